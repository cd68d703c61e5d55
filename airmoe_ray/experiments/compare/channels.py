"""What a trained model is scored on: the exact sum, 20 dB air, and its own channel where that is another one."""

from airmoe_ray.config import ChannelConfig

AIR = ChannelConfig(kind="air", fading="rayleigh", snr_db=20.0)  # what rules are scored on besides the exact sum
OWN = "own"


def scored_channels(own: ChannelConfig, *, crosses: bool) -> dict[str, ChannelConfig]:
    """Channels by the names that records have for them; `crosses`: whether outputs cross one at all."""
    found = {"ideal": AIR.model_copy(update={"kind": "ideal"})}
    if crosses:
        found["air"] = AIR
        plain = own.model_copy(update={"rho_grad": AIR.rho_grad})  # which matters to gradients alone
        if plain != AIR:
            found[OWN] = plain
    return found


def channel_words(channel: ChannelConfig) -> str:
    """For people."""
    if channel.kind == "ideal":
        return "the exact sum"
    other = {
        "gamma_th": channel.gamma_th,
        "truncation": channel.truncation,
        "power": channel.power,
        "digital_bits": channel.digital_bits,
        "rician_factor": channel.rician_factor,
    }
    told = [f"{name} {value}" for name, value in other.items() if value != getattr(AIR, name)]
    fading = "no" if channel.fading == "none" else channel.fading.title()
    kind = "air" if channel.kind == "air" else "digital links"
    return ", ".join([f"{channel.snr_db:g} dB {kind} with {fading} fading", *told])
