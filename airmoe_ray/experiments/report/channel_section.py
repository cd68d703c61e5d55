"""Channel and ledger in words, beside what the alternatives would cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from airmoe_ray.config import Config
from airmoe_ray.experiments.report.page import paragraph, section, table
from airmoe_ray.radio.ledger import alternatives, label_entropy

_LINKS = {
    "downlink_broadcast_bits": ("down, to all", "bit", "features and query, once"),
    "uplink_routing_bits": ("up, from all", "bit", "statistics and fade bits, C_route of Eq. (3)"),
    "downlink_routed_bits": ("down, to all", "bit", "who is routed"),
    "uplink_report_bits": ("up, from the routed", "bit", "what fusion and power control need"),
    "downlink_weights_bits": ("down, to the routed", "bit", "weights and the common scale"),
    "air_channel_uses": ("air, the routed at once", "complex uses", "payload, whatever K is"),
}
_INSTEAD = {
    "uplink_raw_feature_bits": ("up, from all", "bit", "instead of statistics: every client's hidden features"),
    "tdma_bits": ("up, the routed in turn", "bit", "instead of the air: quantised outputs"),
    "tdma_channel_uses": ("up, the routed in turn", "complex uses", "the same at the capacity of each link"),
}


def channel_section(
    config: Config, communication: dict[str, float | None], confusion: Sequence[Mapping[str, Any]]
) -> str:
    """The channel as configured, and what crossed it per image; `confusion` tells how often a label is predicted."""
    channel = config.channel
    rows = [
        ("kind", channel.kind),
        ("SNR", f"{channel.snr_db:g} dB"),
        ("fading", channel.fading),
        ("truncation, |gamma|^2 below", f"{channel.gamma_th:g}"),
    ]
    words = (
        "Means over all images of the split, per image. Pilots come on top, and grow with those who transmit. Labels "
        "are counted at the entropy of the answers' classes, H bits per cell; a coder that looks at neighbours needs "
        "less. Labels can be voted on, not weighed and added."
    )
    return section(
        "Channel and ledger",
        table(("channel", ""), rows, kind="words"),
        table(
            ("link", "amount", "unit", "what it is"),
            ledger_table(config, communication, confusion),
            kind="ledger",
        ),
        paragraph(words, "quiet"),
    )


def ledger_table(
    config: Config, communication: dict[str, float | None], confusion: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str, str]]:
    """Rows of link, amount, unit and meaning: what crossed, then what would have crossed instead."""
    rows = [
        (link, amount(communication[name]), unit, words)
        for name, (link, unit, words) in (_LINKS | _INSTEAD).items()
        if name in communication
    ]
    whole = confusion[0] if len(confusion) == 1 else None  # parts of a mix have other classes each
    entropy = label_entropy([sum(column) for column in zip(*whole["pixels"], strict=True)]) if whole else None
    other = alternatives(config, communication, classes=len(whole["classes"]) if whole else 1, entropy=entropy)
    rows += [
        (
            "up, from all",
            amount(other.gate_uplink_bits),
            "bit",
            "instead of statistics: a gate at the cloud, fade bits",
        ),
        (
            "up, once for all images",
            amount(other.mirrored_frl_bits),
            "bit",
            f"instead of statistics: FRLs mirrored at the cloud, N M d b; {other.mirrored_inputs:.0f} images' C_route",
        ),
    ]
    if entropy is not None and other.label_bits is not None:
        labels = f"instead of the air: argmax labels, entropy-coded, H = {entropy:.2f} bit per cell, measured"
        rows.append(("up, the routed in turn", amount(other.label_bits), "bit", labels))
        if other.label_channel_uses is not None:
            uses = amount(other.label_channel_uses)
            rows.append(("up, the routed in turn", uses, "complex uses", "the same at the capacity of each link"))
    return rows


def amount(value: float | None) -> str:
    """A number with thin groups of three, or a dash."""
    return "-" if value is None else f"{value:,.0f}".replace(",", "\u202f")
