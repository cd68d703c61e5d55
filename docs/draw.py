"""Draws the pictures of `architecture.md`: `python docs/draw.py` writes the SVG files beside this one.

A picture is a list of rows from top to bottom: computations on a lane, and messages between lanes. Colours follow the
reader's light or dark theme; the background is the picture's own, so that either is readable on any page.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, MARGIN = 1080, 24
LANE_TOP, FIRST_ROW = 24, 108  # top of the lanes' heads, and of the first row below them
LINE = 21  # height of a line of text

STYLE = """
  text { fill: #1f2328; font: 16px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
  .page { fill: #ffffff; } .head { font-weight: 600; } .small { fill: #59636e; font-size: 14px; }
  .halo { paint-order: stroke; stroke: #ffffff; stroke-width: 6px; } .life { stroke: #d1d9e0; stroke-width: 2; }
  .wire { stroke: #59636e; stroke-width: 2; } .tip { fill: #59636e; }
  .air { stroke: #bc4c00; stroke-width: 4; } .airtip { fill: #bc4c00; } .box { stroke-width: 1.5; }
  .front { fill: #dafbe1; stroke: #1a7f37; } .cloud { fill: #ddf4ff; stroke: #0969da; }
  .channel { fill: #fff1e5; stroke: #bc4c00; } .clients { fill: #fbefff; stroke: #8250df; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; } text { fill: #f0f6fc; } .small { fill: #9198a1; } .halo { stroke: #0d1117; }
    .life { stroke: #3d444d; } .wire { stroke: #9198a1; } .tip { fill: #9198a1; }
    .air { stroke: #f0883e; } .airtip { fill: #f0883e; }
    .front { fill: #12261e; stroke: #3fb950; } .cloud { fill: #121d2f; stroke: #4493f8; }
    .channel { fill: #2b1d10; stroke: #f0883e; } .clients { fill: #221a33; stroke: #ab7df8; }
  }
"""


@dataclass(frozen=True)
class Lane:
    """A process, as a column."""

    kind: str  # class of the style sheet
    x: int
    name: str
    where: str


@dataclass(frozen=True)
class Work:
    """Something a process computes."""

    lane: str
    lines: tuple[str, ...]
    width: int = 250


@dataclass(frozen=True)
class Message:
    """Something that crosses; `size` is what it takes per image."""

    sender: str
    receiver: str
    text: str
    size: str
    on_air: bool = False


@dataclass(frozen=True)
class Picture:
    """Lanes and rows."""

    title: str
    lanes: tuple[Lane, ...]
    rows: tuple[Work | Message, ...]

    def svg(self) -> str:
        """The whole file."""
        x = {lane.kind: lane.x for lane in self.lanes}
        body, y = [], FIRST_ROW
        for row in self.rows:
            drawn, height = _work(row, x, y) if isinstance(row, Work) else _message(row, x, y)
            body += drawn
            y += height
        height = y + MARGIN
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" role="img"',
            f'  viewBox="0 0 {WIDTH} {height}">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
        ]
        for lane in self.lanes:
            lines.append(f'<line class="life" x1="{lane.x}" y1="{LANE_TOP + 58}" x2="{lane.x}" y2="{y}"/>')
            lines += _box(lane.kind, lane.x, LANE_TOP, 224, 58)
            lines.append(_text(lane.x, LANE_TOP + 25, lane.name, "head"))
            lines.append(_text(lane.x, LANE_TOP + 46, lane.where, "small"))
        return "\n".join([*lines, *body, "</svg>", ""])


def _work(row: Work, x: dict[str, int], y: int) -> tuple[list[str], int]:
    tall = LINE * len(row.lines) + 13
    drawn = _box(row.lane, x[row.lane], y, row.width, tall)
    drawn += [_text(x[row.lane], y + 23 + LINE * n, line, "") for n, line in enumerate(row.lines)]
    return drawn, tall + 14


def _message(row: Message, x: dict[str, int], y: int) -> tuple[list[str], int]:
    start, end = x[row.sender], x[row.receiver]
    way = 1 if end > start else -1
    line_y, middle = y + 26, (start + end) // 2
    wire, tip = ("wire air", "airtip") if row.on_air else ("wire", "tip")
    drawn = [
        f'<line class="{wire}" x1="{start}" y1="{line_y}" x2="{end - 10 * way}" y2="{line_y}"/>',
        f'<path class="{tip}" d="M{end} {line_y} l{-12 * way} -6 v12 z"/>',
        _text(middle, line_y - 8, row.text, "halo"),
        _text(middle, line_y + 19, row.size, "small halo"),
    ]
    return drawn, 58


def _box(kind: str, x: int, y: int, width: int, height: int) -> list[str]:
    return [f'<rect class="box {kind}" x="{x - width // 2}" y="{y}" width="{width}" height="{height}" rx="6"/>']


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="middle" class="{kind}">{escape(text)}</text>'


FRONT = Lane("front", 146, "Front end", "api, Orchestrator")
CLOUD = Lane("cloud", 410, "Cloud", "an actor")
CHANNEL = Lane("channel", 670, "Channel (simulated)", "an actor")
CLIENTS = Lane("clients", 930, "Clients", "actors: hosts")

IMAGE = Picture(
    "The way of one image",
    (FRONT, CLOUD, CHANNEL, CLIENTS),
    (
        Work("front", ("decode, check, fit to size,", "queue, join a batch"), 230),
        Message("front", "cloud", "segment: images, ids", "pixels"),
        Work("cloud", ("features F, query Q", "Eq. (7)-(8)"), 220),
        Message("cloud", "clients", "read, all N: Q", "2 048 bit, one broadcast"),
        Work("clients", ("estimate gamma_j, each its own;", "read the FRL, P_j", "Eq. (9)-(10), (13)"), 270),
        Message("clients", "cloud", "P_j and the bit “in deep fade”", "N × 2 049 bit"),
        Work("cloud", ("divergence, scores, TopK;", "drop who is in deep fade", "Eq. (14)-(16)"), 230),
        Message("cloud", "clients", "forward, the K routed: F", "7.9 Mbit, one broadcast; who is routed: N bit"),
        Work("clients", ("expert: h_j, y_j; R_j, delta_j", "Eq. (17)-(20)"), 250),
        Message("clients", "cloud", "delta_j and c_j", "K × 64 bit"),
        Work("cloud", ("weights beta, scale rho", "Eq. (21)-(22)"), 220),
        Message("cloud", "clients", "transmit: beta_j, rho", "K × 32 bit + 32 bit"),
        Message("clients", "channel", "x_j = b_j y_j, Eq. (22)", "7 680 uses, all at once", on_air=True),
        Work("channel", ("r = sum gamma_j x_j + n", "Eq. (4)"), 230),
        Message("channel", "cloud", "r", "what arrives: 7 680 symbols", on_air=True),
        Work("cloud", ("Re{r} / sqrt(rho), Eq. (23);", "adds its own head, if it has one"), 270),
        Message("cloud", "clients", "renew, with serve.renew_frl", "Eq. (11)-(12), on disk before the answer leaves"),
        Message("cloud", "front", "BatchResult", "logits and account"),
        Work("front", ("upsample, crop, argmax;", "metrics, encode, answer"), 230),
    ),
)

STEP = Picture(
    "The way of one training step, clients in their own processes",
    (
        Lane("cloud", 200, "Cloud", "the airmoe process"),
        Lane("channel", 540, "Channel (simulated)", "an actor"),
        Lane("clients", 880, "Clients", "actors: learning hosts"),
    ),
    (
        Work("cloud", ("a batch of cached features F,", "query Q with its graph, Eq. (8)"), 270),
        Message("cloud", "clients", "read, forward, transmit: as for one image", "7 866 474 bit"),
        Message("clients", "cloud", "P_j, fade bits, delta_j, c_j", "20 618 bit"),
        Message("clients", "channel", "x_j, all at once", "7 680 uses", on_air=True),
        Message("channel", "cloud", "r", "what arrives: 7 680 symbols", on_air=True),
        Work("cloud", ("loss, Eq. (24)-(26)", "g = dL/dy^, dL_LB/dP_j"), 250),
        Message("cloud", "clients", "weigh, the K routed: g", "245 760 bit, one broadcast"),
        Message("clients", "cloud", "a_j = <g, y_j>", "K × 32 bit"),
        Work("cloud", ("dL/d(delta_j) by Eq. (21),", "dL/dc_j with channel.rho_grad"), 270),
        Message(
            "cloud", "clients", "learn, all N: dL_LB/dP_j; the routed: dL/d(delta_j)", "N × 2 048 bit + K × 32 bit"
        ),
        Work(
            "clients",
            (
                "backward through Dec, Enc, psi",
                "and through the read into p_j;",
                "Adam and SGD step; then renew",
                "the FRL, Eq. (11)-(12)",
            ),
            290,
        ),
        Message("clients", "cloud", "its part of dL/dQ", "N × 2 048 bit"),
        Work("cloud", ("adds the parts and its own,", "backward into phi, Adam step"), 270),
    ),
)

PICTURES = {"image.svg": IMAGE, "step.svg": STEP}

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        path = Path(__file__).with_name(name)
        path.write_text(picture.svg(), encoding="utf-8")
        print(f"wrote {path}")
