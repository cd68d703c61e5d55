"""`airmoe scale`: changes the number of experts, or of hosts of one, on a running server."""

from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from airmoe_ray.errors import UserError
from airmoe_ray.storage.shipped import DEFAULT, state_folder
from api.cli.common import JsonOption, print_json
from api.cli.remote.connection import HERE, UrlOption, call_json
from api.cli.remote.status import print_experts


def scale(
    experts: Annotated[int | None, typer.Option(min=1, help="New number of experts N.")] = None,
    replicas: Annotated[list[str], typer.Option(metavar="EXPERT=N", help="Hosts of one expert; repeatable.")] = [],  # noqa: B006
    url: UrlOption = HERE,
    run: Annotated[str, typer.Option(help="What is served, by its --run: for its admin token.")] = DEFAULT,
    admin_token: Annotated[str | None, typer.Option(envvar="AIRMOE_ADMIN_TOKEN", help="Admin token instead.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Change the number of experts, or of hosts of one (owner and replicas), on a running server."""
    from api.http.admin import read_admin_token

    request: dict[str, Any] = {"replicas": dict(_replica(text) for text in replicas)}
    if experts is not None:
        request["experts"] = experts
    if experts is None and not replicas:
        raise UserError("nothing to do; give --experts N or --replicas EXPERT=N")
    token = admin_token or read_admin_token(state_folder(run), _port(url))
    headers = {"Authorization": f"Bearer {token}"}
    body = call_json("POST", f"{url}/experts/scale", has="experts", headers=headers, json=request)
    if as_json:
        print_json(body)
    else:
        print_experts(body["experts"])


def _port(url: str) -> int:
    try:
        parts = urlsplit(url)
        return parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise UserError(f"--url {url}: {error}") from None


def _replica(text: str) -> tuple[str, int]:
    client, _, count = text.partition("=")
    if not (client.isdigit() and count.isdigit()):
        raise UserError(f"--replicas {text}: expected EXPERT=N, such as 3=2")
    return client, int(count)
