"""Keys in the settings of commands that have no use for them."""

import sys

import pytest

from airmoe_ray.errors import UserError
from api.cli import main
from api.cli import train as train_module

GUARDED = ["--set", "serve.api_keys=[opens-all]", "--set", "serve.admin_token=rules-all", "--set", "serve.queue=7"]


def said(monkeypatch, capsys, *arguments: str) -> str:
    """All that the command prints."""
    monkeypatch.setattr(sys, "argv", ["airmoe", *arguments])
    with pytest.raises(SystemExit):
        main.run()
    return "".join(capsys.readouterr())


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_resolved_configuration_is_printed_without_secrets(monkeypatch, capsys, form):
    printed = said(monkeypatch, capsys, "config", *GUARDED, *form)
    assert "queue" in printed
    assert "s-all" not in printed


def test_training_says_that_a_run_does_not_keep_keys(monkeypatch, capsys, tmp_path):
    def stop(*_: object, **__: object) -> None:
        raise UserError("far enough")

    monkeypatch.setattr(train_module, "_train", stop)
    lines = said(monkeypatch, capsys, "train", "--run", str(tmp_path), *GUARDED).splitlines()
    assert lines[:2] == [
        f"serve.{key} is not kept with the run; give it to `airmoe serve`" for key in ("admin_token", "api_keys")
    ]
