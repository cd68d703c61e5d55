"""The pages: links lead somewhere, equations are cited where the table says, the tree and the pictures are true."""

import importlib
import inspect
import io
import re
import runpy
import tokenize
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from airmoe_ray.errors import UserError
from airmoe_ray.experiments.compare.records import read_records

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [path for name in ("airmoe_ray", "actors", "api", "tests") for path in (ROOT / name).rglob("*.py")]
IMPLEMENTED = set(range(1, 41))

_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# `Eq. (22)`, `Eq. (9)-(10), (13)`
_CITED = re.compile(r"Eqs?\.\s*(\(\d+[a-f]?\)(?:(?:-|,\s*|\s+and\s+)\(\d+[a-f]?\))*)")


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(text) for text in re.findall(r"^#+ (.*)$", _CODE.sub("", page.read_text()), re.MULTILINE)}


def numbers(citation: str) -> Iterator[int]:
    """`(9)-(10), (13)` -> 9, 10, 13."""
    for first, last in re.findall(r"\((\d+)[a-f]?\)(?:-\((\d+)[a-f]?\))?", citation):
        yield from range(int(first), int(last or first) + 1)


def cited(text: str) -> set[int]:
    return {number for citation in _CITED.findall(text) for number in numbers(citation)}


def section(page: Path, heading: str) -> str:
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{page.name} has no section {heading!r}"
    return found[1]


def equation_table() -> list[tuple[str, str, Path]]:
    """Equation, dotted name and file of every row, of the README and of the theory's page; two places, two entries."""
    found = []
    for page in (ROOT / "README.md", ROOT / "docs" / "theory.md"):
        rows = re.findall(r"^\| (.+?) \| .+? \| (.+?) \|$", section(page, "From equation to code"), re.MULTILINE)
        found += [
            (equation, name, (page.parent / file).resolve())
            for equation, places in rows
            for name, file in re.findall(r"\[`([\w.]+)`\]\(([^)]+)\)", places)
        ]
    return found


def resolve(name: str) -> object:
    """`model.frl.FeatureRetrievalLibrary.read` of airmoe_ray."""
    parts = name.split(".")
    folders = next(
        n for n in range(1, len(parts)) if (ROOT / "airmoe_ray" / Path(*parts[:n])).with_suffix(".py").is_file()
    )
    found: object = importlib.import_module(".".join(["airmoe_ray", *parts[:folders]]))
    for attribute in parts[folders:]:
        found = getattr(found, attribute)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file_and_an_anchor(page: Path) -> None:
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}; there are {sorted(anchors(target))}"


def test_every_name_of_the_equation_table_is_in_the_file_it_links_to() -> None:
    table = equation_table()
    assert len(table) > 20
    for _, name, file in table:
        assert inspect.getsourcefile(inspect.unwrap(resolve(name))) == str(file), name  # type: ignore[arg-type]


def test_every_equation_is_cited_in_the_docstring_of_its_one_place() -> None:
    placed: dict[int, list[str]] = {}
    for equation, name, _ in equation_table():
        for number in numbers(equation):
            placed.setdefault(number, []).append(name)
            if number in IMPLEMENTED:
                assert number in cited(inspect.getdoc(resolve(name)) or ""), f"Eq. ({number}) at {name}"
    assert placed.keys() >= IMPLEMENTED
    assert {number: names for number, names in placed.items() if len(names) > 1}.keys() == {22}  # b_j, and rho


def test_every_citation_is_a_number_of_the_paper() -> None:
    assert cited("Eq. (9)-(10), (13) and, by Eq. (22)") == {9, 10, 13, 22}
    wrong = {}
    for path in (*PAGES, *SOURCES):
        text = path.read_text()
        unread = re.findall(r"\bEqs?\b(?!\. \(n\))\S*\s?\S*", _CITED.sub("", text))  # forms the walk does not see
        if path != Path(__file__) and (bad := [*unread, *(cited(text) - set(range(1, 41)))]):
            wrong[str(path.relative_to(ROOT))] = bad
    assert not wrong


def test_how_to_add_names_what_is_in_the_file_it_links_to() -> None:
    page = ROOT / "docs" / "architecture.md"
    places = re.findall(
        r"((?:`[\w.]+`\s+and\s+)*`[\w.]+`)\s+(?:in|of)\s+\[[^\]]*\]\(([^)#]+)\)", section(page, "How to add")
    )
    named = [(name, page.parent / file) for names, file in places for name in re.findall(r"`([\w.]+)`", names)]
    assert len(named) > 15
    for name, file in named:
        for part in name.split("."):  # `Class.field`
            defined = rf"^\s*(?:(?:async def|def|class|const|function) {part}\b|{part}(?:: .*)? = |{part}: )"
            assert re.search(defined, file.read_text(), re.MULTILINE), f"{name} is not in {file.name}"


def test_the_tree_lists_the_folders_that_exist_and_no_others() -> None:
    tree = re.findall(r"^( *)(\w+)/ ", section(ROOT / "README.md", "What is where"), re.MULTILINE)
    listed, top = set(), ""
    for indent, name in tree:
        top = top if indent else name
        listed.add(f"{top}/{name}" if indent else name)
    packages = {"airmoe_ray", "actors", "api"}
    rooms = {f"{p}/{f.parent.name}" for p in packages for f in (ROOT / p).glob("*/__init__.py")}
    assert listed == packages | rooms | {"configs", "dashboards", "docs", "examples", "tests"}
    assert all((ROOT / name).is_dir() for name in listed)


def test_the_pictures_are_what_the_script_draws() -> None:
    pictures = runpy.run_path(str(ROOT / "docs" / "draw.py"))["PICTURES"]
    assert pictures.keys() == {path.name for path in (ROOT / "docs").glob("*.svg")}
    for name, picture in pictures.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == picture.svg(), (
            f"run python docs/draw.py for {name}"
        )


def test_the_glossary_has_at_most_twelve_words() -> None:
    words = re.findall(r"^\| (\w+) \| ", section(ROOT / "docs" / "architecture.md", "Words"), re.MULTILINE)[1:]
    assert 5 < len(set(words)) == len(words) <= 12, words


def legend() -> dict[str, str]:
    """Letters of the one legend, and the first word of what each means."""
    text = section(ROOT / "docs" / "architecture.md", "Shape suffixes")
    rows = re.findall(r"^\| ([\w ,]+?) \| `?(\w+)", text, re.MULTILINE)[1:]  # the first one is the table's head
    return {letter: word for letters, word in rows for letter in re.findall(r"\w", letters)}


def test_every_shape_suffix_is_in_the_legend() -> None:
    known = legend().keys()
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name, suffix in shape_suffixes(path)
        if not set(suffix) <= known
    }
    assert not unknown


def shape_suffixes(path: Path) -> Iterator[tuple[str, str]]:
    """Names like `js_BN` with the part after the last underscore."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        found = re.fullmatch(r"[a-z_0-9]*[a-z0-9]_([A-Za-z0-9]*[A-Z][A-Za-z0-9]*)", token.string)
        if token.type == tokenize.NAME and found and found[1] not in ("GET", "HEAD", "POST"):
            yield token.string, found[1]


def test_the_heads_of_files_give_suffixes_the_meaning_of_the_legend() -> None:
    known, heads = legend(), 0
    for path in SOURCES:
        found = re.search(r'Suffixes: (.*?)(?:\n\n|""")', path.read_text(), re.DOTALL)
        if found is None or path == Path(__file__):
            continue
        heads += 1
        for item in re.split(r"[,;.]\s*", re.sub(r"\s*\([^)]*\)", "", found[1]).strip(" .\n")):
            letters, word = re.fullmatch(r"(\w(?: \w)?)\s+(\w+).*", item, re.DOTALL).groups()  # type: ignore[union-attr]
            assert {known[letter] for letter in letters.replace(" ", "")} == {word}, f"{path.name}: {item}"
    assert heads > 30


def test_the_tables_of_results_are_those_of_the_records() -> None:
    results = runpy.run_path(str(ROOT / "docs" / "results.py"))
    page = results["PAGE"].read_text()
    assert results["PLACE"].search(page)
    assert results["filled"](page) == page
    wrong = re.sub(r"\d\d\.\d\d \[", "99.99 [", page, count=1)  # a figure that no run gave
    assert results["filled"](wrong) == page


def test_runs_of_two_configurations_are_not_one_row_of_the_results() -> None:
    results = runpy.run_path(str(ROOT / "docs" / "results.py"))
    records = list(read_records(ROOT / "docs" / "results" / "camvid-short").values())
    assert results["grouped"](records)
    with pytest.raises(UserError, match=f"{re.escape(records[0].method)}: runs of 2 configurations"):
        results["grouped"]([*records, replace(records[0], settings="another", seed=7)])
