"""From YAML files and `--set a.b=c` to a checked `Config`: defaults < YAML < `--set`.

Every mistake becomes one line: the key, the value, what is allowed, and the nearest valid key.
"""

import difflib
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from airmoe_ray.config import SECRETS, Config, PartConfig
from airmoe_ray.errors import ConfigError


def load_config(file: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a file (a path, or the name of a shipped one) with `a.b=c` overrides on top."""
    tree = {} if file is None else read_yaml(find_config(file))
    return parse_config(tree, overrides)


def parse_config(tree: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The configuration of a nested mapping with overrides on top."""
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise ConfigError(f"--set {override!r}: expected KEY=VALUE, such as channel.snr_db=10")
        _assign(tree, key.strip(), _parse_value(text))
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(_part_named(first, tree) + _explain(first)) from None


def find_config(file: str | Path) -> Path:
    """A path as given, or a configuration shipped with the package: `quickstart`, `quickstart.yaml`."""
    path = Path(file)
    if path.is_file():
        return path
    shipped = Path(str(resources.files("configs")))
    for candidate in (shipped / path.name, shipped / f"{path.name}.yaml"):
        if candidate.is_file() and path.parent.name in ("", "configs"):
            return candidate
    names = sorted(p.stem for p in shipped.glob("*.yaml"))
    raise ConfigError(f"--config {file}: no such file, nor a shipped configuration; shipped are {', '.join(names)}")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping, or a `ConfigError` that names the file and line."""
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', error)})") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(tree).__name__}")
    return tree


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML, every field stated but secrets: it is written into folders that travel."""
    return yaml.safe_dump(config.model_dump(mode="json", exclude=SECRETS), sort_keys=False)


def fields(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """(key, type, default, meaning) of every setting."""
    for name, info in model.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from fields(annotation, f"{prefix}{name}.")
        else:
            default = info.get_default(call_default_factory=True)
            meaning = " ".join((info.description or "").split())
            yield f"{prefix}{name}", _type_name(annotation), default, meaning


def _type_name(annotation: Any) -> str:
    arguments = get_args(annotation)
    if not arguments:
        return str(getattr(annotation, "__name__", annotation))
    if getattr(annotation, "__origin__", None) in (list, tuple):
        return f"{annotation.__origin__.__name__} of {_type_name(arguments[0])}"
    if all(isinstance(a, str | int | float) for a in arguments):  # Literal
        return "|".join(str(a) for a in arguments)
    names = [_type_name(a) for a in arguments if hasattr(a, "__name__") or get_args(a)]
    return "|".join("unset" if name == "NoneType" else name for name in names)


def _parse_value(text: str) -> Any:
    try:
        return yaml.safe_load(text) if text.strip() else ""
    except yaml.YAMLError:
        return text


def _assign(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        node = tree.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {dotted}: {parent} is a value, not a block of settings")
        tree = node
    tree[last] = value


def _part_named(error: ErrorDetails, tree: dict[str, Any]) -> str:
    """Which part of a mix a complaint is about, by what it is called: numbers in a list have to be counted."""
    match error["loc"]:
        case ("data", "parts", int(index), *_):
            part = tree["data"]["parts"][index]
            called = part.get("title") or part.get("name") if isinstance(part, dict) else None
            return f"part {called}: " if called else ""
    return ""


def _explain(error: ErrorDetails) -> str:
    """One line for pydantic's first complaint."""
    place = [str(part) for part in error["loc"]]
    # names of union branches and validators are pydantic's own, not keys of ours
    keys = {part for key, *_ in fields() for part in key.split(".")}
    inside = place[:2] == ["data", "parts"]
    if inside:
        keys |= {*place[2:3], *PartConfig.model_fields}
    if error["type"] == "extra_forbidden":
        dotted = ".".join(place)
        valid = [key for key, *_ in fields()] if len(place) > 1 else list(Config.model_fields)
        if inside:
            valid = [".".join((*place[:3], name)) for name in PartConfig.model_fields]
        near = difflib.get_close_matches(dotted, valid, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]}?" if near else "`airmoe config` lists all keys"
        return f"{dotted}: unknown key; {hint}"
    message = error["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not place:
        return message
    dotted = ".".join(part for part in place if part in keys)
    if dotted in {f"{block}.{key}" for block, keys in SECRETS.items() for key in keys}:
        return f"{dotted}: {message}"  # logs keep what is printed
    return f"{dotted} = {error['input']!r}: {message}"
