"""`airmoe config`: lists every setting with default and meaning, or prints the resolved configuration."""

import sys

from rich.markup import escape
from rich.table import Table

from airmoe_ray.config import SECRETS
from airmoe_ray.config_file import fields, load_config, to_yaml
from api.cli.common import ConfigOption, JsonOption, SetOption, print_json, stdout


def config_(
    config: ConfigOption = None,
    overrides: SetOption = [],  # noqa: B006  typer copies it
    as_json: JsonOption = False,
) -> None:
    """List every setting with its default and meaning; with --config or --set, print the resolved configuration.

    Keys and tokens are left out.
    """
    resolved = load_config(config, overrides)
    if config is not None or overrides:
        if as_json:
            print_json(resolved.model_dump(mode="json", exclude=SECRETS))
        else:
            sys.stdout.write(to_yaml(resolved))
        return
    if as_json:
        print_json({key: {"type": kind, "default": default, "meaning": text} for key, kind, default, text in _rows()})
        return
    table = Table("setting", "default", "meaning", show_lines=False)
    for key, kind, default, meaning in _rows():
        shown = "unset" if default is None else str(default)
        table.add_row(key, shown, f"{escape(meaning)} [dim]{escape(f'[{kind}]')}[/dim]")
    stdout.print(table)


def _rows() -> list[tuple[str, str, object, str]]:
    return list(fields())
