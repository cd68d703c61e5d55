"""One HTML page that needs nothing else: style, charts and pictures are in it, and no script."""

import base64
import io
from collections.abc import Sequence
from html import escape
from importlib import resources

from PIL import Image

from airmoe_ray.data.base import UInt8Array

# nothing may be asked of any place, should something slip in from a file that was read
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_PICTURE_WIDTH = 320


def page(title: str, sections: Sequence[str]) -> str:
    """The whole document."""
    css = resources.files(__package__).joinpath("page.css").read_text()
    body = "\n".join(section for section in sections if section)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def section(heading: str, *parts: str) -> str:
    """A part of the page under a heading."""
    return f"<section>\n<h2>{escape(heading)}</h2>\n" + "\n".join(parts) + "\n</section>"


def paragraph(text: str, kind: str = "") -> str:
    """Plain words."""
    return f'<p class="{kind}">{escape(text)}</p>'


def figure(content: str, caption: str = "") -> str:
    """A chart with what it shows."""
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{content}{words}</figure>"


def row(*figures: str, kind: str = "") -> str:
    """Figures beside each other, where there is room."""
    return f'<div class="row {kind}">{"".join(figures)}</div>'


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """The few figures that say most: value and what it is."""
    inner = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in figures
    )
    return f'<div class="tiles">{inner}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "") -> str:
    """Cells of text, escaped."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def picture(pixels: UInt8Array, *, alt: str, photograph: bool) -> str:
    """A small picture inside the page: photographs as JPEG, masks without loss."""
    image = Image.fromarray(pixels)
    if image.width > _PICTURE_WIDTH:
        height = round(image.height * _PICTURE_WIDTH / image.width)
        how = Image.Resampling.LANCZOS if photograph else Image.Resampling.NEAREST
        image = image.resize((_PICTURE_WIDTH, height), how)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=88) if photograph else image.save(buffer, "PNG", optimize=True)
    return image_tag(buffer.getvalue(), "jpeg" if photograph else "png", alt=alt)


def image_tag(content: bytes, kind: str, *, alt: str, css: str = "") -> str:
    """A picture file inside the page."""
    return (
        f'<img class="{css}" alt="{escape(alt)}" src="data:image/{kind};base64,{base64.b64encode(content).decode()}">'
    )
