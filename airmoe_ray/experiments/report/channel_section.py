"""Channel and ledger in words, beside what the alternatives would cost."""

from airmoe_ray.config import Config
from airmoe_ray.experiments.report.page import paragraph, section, table
from airmoe_ray.radio.ledger import BITS_PER_REAL

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


def channel_section(config: Config, communication: dict[str, float | None]) -> str:
    """The channel as configured, and what crossed it per image."""
    channel = config.channel
    rows = [
        ("kind", channel.kind),
        ("SNR", f"{channel.snr_db:g} dB"),
        ("fading", channel.fading),
        ("truncation, |gamma|^2 below", f"{channel.gamma_th:g}"),
    ]
    words = "Means over all images of the split, per image. Pilots come on top, and grow with those who transmit."
    return section(
        "Channel and ledger",
        table(("channel", ""), rows, kind="words"),
        table(
            ("link", "amount", "unit", "what it is"),
            ledger_table(config, communication),
            kind="ledger",
        ),
        paragraph(words, "quiet"),
    )


def ledger_table(config: Config, communication: dict[str, float | None]) -> list[tuple[str, str, str, str]]:
    """Rows of link, amount, unit and meaning: what crossed, then what would have crossed instead."""
    rows = [
        (link, amount(communication[name]), unit, words)
        for name, (link, unit, words) in (_LINKS | _INSTEAD).items()
        if name in communication
    ]
    counts = config.frl.prototypes
    prototypes = config.experts.count * counts if isinstance(counts, int) else sum(counts)
    mirrored = prototypes * config.frl.dim * BITS_PER_REAL
    return [
        *rows,
        ("up", "0", "bit", "instead of statistics: a gate at the cloud"),
        (
            "up, once for all images",
            amount(mirrored),
            "bit",
            "instead of statistics: FRLs mirrored at the cloud, N M d b",
        ),
    ]


def amount(value: float | None) -> str:
    """A number with thin groups of three, or a dash."""
    return "-" if value is None else f"{value:,.0f}".replace(",", "\u202f")
