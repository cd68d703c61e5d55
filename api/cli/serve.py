"""`airmoe serve`: starts cloud, experts and channel of a run, and the HTTP front end."""

from typing import Annotated

import typer

from airmoe_ray.config import Config
from airmoe_ray.storage.bucket import shown
from airmoe_ray.storage.shipped import DEFAULT, find_model
from api.cli.common import DEFAULT_PORT, AddressOption, Checkpoint, CheckpointOption, RunOption, SetOption, stderr
from api.cli.reporters import reporting


def serve(
    run: RunOption = DEFAULT,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = DEFAULT_PORT,
    address: AddressOption = None,
    checkpoint: CheckpointOption = Checkpoint.LAST,
    nodes: Annotated[
        int, typer.Option(min=1, help="Wait until this many nodes have joined, or cluster.start_deadline_s is over.")
    ] = 1,
    key: Annotated[
        str | None, typer.Option(envvar="AIRMOE_API_KEY", help="A key that opens every route, beside serve.api_keys.")
    ] = None,
    admin_token: Annotated[
        str | None, typer.Option(envvar="AIRMOE_ADMIN_TOKEN", help="Admin token, instead of serve.admin_token.")
    ] = None,
    overrides: SetOption = [],  # noqa: B006  typer copies it
) -> None:
    """Serve a run, or the model in the box: POST images to /segment, open the page at /.

    Settings are the run's own, with --set on top. Keys are best given in the environment, where nobody else reads
    them. Ctrl-C ends it and everything it started.
    """
    place = find_model(run, best=checkpoint is Checkpoint.BEST)
    # imported late: ray and torch take seconds, and mistakes in the options should not wait for them
    from airmoe_ray.config_file import parse_config
    from airmoe_ray.model.cloud_parts import check_servable
    from airmoe_ray.storage.checkpoint import load_checkpoint

    stored, card = load_checkpoint(place.checkpoint)
    config = _with_keys(parse_config(stored.model_dump(mode="json"), overrides), key, admin_token)
    check_servable(config)
    from actors.serving.system import System
    from api.http.server import check_bind, set_up_logging
    from api.http.server import serve as serve_run

    set_up_logging()
    check_bind(config, host, port)
    system = System(place.checkpoint, config, state=place.state)
    with reporting() as report:
        report.line(f"starting {config.experts.count} experts, cloud and channel as Ray actors")
        listens = f"[{host}]" if ":" in host else host

        def announce() -> None:
            report.close()
            report.line(f"serving {shown(run)} on http://{listens}:{port}  (Ctrl-C ends it)")
            if config.cluster.experts_per_actor == "auto":
                report.line(f"cluster.experts_per_actor=auto: {system.plan.packing}")
            if card.terms:
                report.line(f"terms of the weights: {card.terms}")

        try:
            serve_run(
                system,
                place.state,
                host,
                port,
                address=address,
                nodes=nodes,
                progress=report.progress("actors ready"),
                announce=announce,
            )
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    stderr.print("stopped")


def _with_keys(config: Config, key: str | None, admin_token: str | None) -> Config:
    serve = config.serve
    given = {"api_keys": [*serve.api_keys, key] if key else serve.api_keys}
    return config.model_copy(
        update={"serve": serve.model_copy(update={**given, "admin_token": admin_token or serve.admin_token})}
    )
