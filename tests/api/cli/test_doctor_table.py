"""Whatever doctor can say is told wrong has a line in the pages, by which people find it."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
TOO_FEW = 9  # letters; such findings carry somebody else's words: a command's, Ray's, an object store's


def words(node: ast.expr) -> list[str]:
    """What is fixed in a message."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return [text for part in parts for text in words(part)]
        case ast.BinOp(left=left, right=right):
            return words(left) + words(right)
    return []


def findings() -> Iterator[tuple[str, str]]:
    """Where each is raised, and the longest of its own words."""
    for path in sorted((ROOT / "api/cli/doctor").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Raise(exc=ast.Call(func=ast.Name(id="UserError" | "CommandError"), args=[message, *_])):
                    yield f"{path.name}:{node.lineno}", max(words(message), key=len, default="").strip(" ;,:()")


def test_every_finding_has_a_line_in_the_page() -> None:
    page = (ROOT / "docs/cluster.md").read_text()
    section = page.partition("## What goes wrong, and what doctor says")[2].partition("\n## ")[0]
    found = dict(findings())
    assert len(found) > 80
    assert {where: text for where, text in found.items() if len(text) >= TOO_FEW and text not in section} == {}
