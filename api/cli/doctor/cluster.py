"""`airmoe doctor --cluster FILE`: checks a cluster file, what it sends, and its machines, before `ray up` is called."""

import importlib.util
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.storage.bucket import is_url, shown
from api.cli.doctor import image
from api.cli.doctor.aws import check_account
from api.cli.doctor.cluster_file import TOKEN, ClusterFile, check_schema, examples_left, read_documents
from api.cli.doctor.machines import check_machines
from api.cli.doctor.placement import fully_grown
from api.cli.doctor.results import CheckResult, run_check
from api.cli.doctor.storage import writable_from_here


def check_cluster(
    path: Path, config: str | None, overrides: Sequence[str], *, storage: str | None = None
) -> list[CheckResult]:
    """Results of all checks; those that make no sense because another one failed are left out."""
    try:
        documents = read_documents(path)
        if "apiVersion" in documents[0]:
            from api.cli.doctor.kubernetes.manifest import check_manifest

            return [*check_manifest(path, documents), *_check_storage(storage)]
        file = check_schema(path, documents[0])
    except UserError as error:
        return [CheckResult("file", False, str(error))]
    settings: Config | None = None

    def run() -> str:
        nonlocal settings
        if config is None and (where := _on_the_head(file)):
            return where
        source, settings = _settings(file, config, overrides)
        return f"{source}: {settings.experts.count} experts"

    addresses = run_check("addresses", lambda: _addresses(file))
    results = [
        CheckResult("file", True, f"{path}: provider {file.provider}, as Ray's schema wants it"),
        addresses,
        run_check("tools", lambda: _tools(file)),
        run_check("token", lambda: _token(file)),
        run_check("sent files", lambda: _sent(file)),
        run_check("run", run),
        *_check_storage(storage),
    ]
    if not addresses.ok:
        return results  # there are no machines at the example's addresses
    if file.provider == "local":
        return results + check_machines(file, settings, with_dataset=config is not None, storage=storage)
    return results + _check_provider(file, settings)


def _addresses(file: ClusterFile) -> str:
    if left := examples_left(file.tree):
        raise UserError(f"{', '.join(left)}: still the example's; put in your own")
    return f"{len(file.hosts)} hosts" if file.hosts else "none of the example's are left"


def _tools(file: ClusterFile) -> str:
    if missing := [tool for tool in ("ssh", "rsync") if shutil.which(tool) is None]:
        raise UserError(
            f"{' and '.join(missing)} not found here; `ray up` calls them: install openssh-client and rsync"
        )
    key = (file.tree.get("auth") or {}).get("ssh_private_key")
    if key and not Path(key).expanduser().is_file():
        raise UserError(
            f"auth.ssh_private_key {key}: no such file; `ssh-keygen` makes one, `ssh-copy-id` brings it over"
        )
    if file.provider == "local" and "RAY_TMPDIR" in os.environ:
        raise UserError("RAY_TMPDIR is set: the head would look for the cluster's state elsewhere; unset it")
    return "ssh and rsync are here"


def _token(file: ClusterFile) -> str:
    path = file.mounts.get(TOKEN)
    if path is None:
        raise UserError(f"file_mounts has no {TOKEN}: hosts could not join; mount the token")
    _read_secret(path)
    return f"{path} is there, for you alone"


def _read_secret(path: Path) -> str:
    recipe = f"mkdir -p {path.parent}; (umask 077; openssl rand -hex 32 > {path})"
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; make one: {recipe}") from None
    if len(secret) < 16:
        raise UserError(f"{path}: {len(secret)} characters are too few for a secret; {recipe}")
    if path.stat().st_mode & 0o077:
        raise UserError(f"{path}: others may read it (mode {path.stat().st_mode & 0o777:o}); chmod 600 {path}")
    return secret


def _sent(file: ClusterFile) -> str:
    for there, here in file.mounts.items():
        if there.endswith("api_key"):
            _read_secret(here)
        if not here.exists():
            hint = "make wheel" if here.name == "dist" else f"make it, or change file_mounts['{there}']"
            raise UserError(f"{here}: not here, and {there} on the hosts is to come from it; {hint}")
        if here.name == "dist" and len(list(here.glob("*.whl"))) != 1:
            raise UserError(f"{here}: holds {len(list(here.glob('*.whl')))} wheels, expected one; make wheel")
    return f"{len(file.mounts)} files and folders"


def _on_the_head(file: ClusterFile) -> str | None:
    """What can be said of a run that is not sent and that nodes have: in a folder that they mount, or their own."""
    run = file.served.run
    if is_url(run) or f"{run}/checkpoint" in file.mounts or not run.startswith("/"):
        return None
    if file.provider == "local":
        return (
            f"{run}: not sent; looked for on the head. Placement needs its settings: give --config to have it checked"
        )
    below = next((folder for folder in file.volumes if run == folder or run.startswith(f"{folder}/")), None)
    return below and (
        f"{run}: in {below}, which nodes mount; the head looks for it when `ray up` starts the front end. Placement "
        "needs its settings: give --config to have it checked"
    )


def _settings(file: ClusterFile, config: str | None, overrides: Sequence[str]) -> tuple[str | Path, Config]:
    """Settings of the run that will be served, and where they come from: its folder here, its URL, or --config."""
    from airmoe_ray.config_file import load_config, parse_config
    from airmoe_ray.storage.checkpoint import load_checkpoint
    from airmoe_ray.storage.shipped import find_model, shipped_names

    served = file.served
    here = file.mounts.get(f"{served.run}/checkpoint")
    changes = [*served.overrides, *overrides]
    if config is not None:
        return config, load_config(config, changes)
    if is_url(served.run) or served.run in shipped_names():
        stored, _ = load_checkpoint(find_model(served.run).checkpoint)
        return shown(served.run), parse_config(stored.model_dump(mode="json"), changes)
    if here is None:
        raise UserError(
            f"no file_mounts for {served.run}/checkpoint, which the front end serves; mount it, or give --config where "
            "the head has it already"
        )
    stored, _ = load_checkpoint(here)
    return here, parse_config(stored.model_dump(mode="json"), changes)


def _check_provider(file: ClusterFile, settings: Config | None) -> list[CheckResult]:
    """Checks where the provider makes the machines: they are not there yet."""
    results = []
    if file.provider == "aws":
        results.append(run_check("credentials", _aws))
        if results[0].ok:
            results += check_account(file)
    results += _check_images(file)
    if settings is not None:
        results.append(run_check("placement", lambda: fully_grown(file, settings)))
    results.append(
        CheckResult(
            "nodes", True, "made by `ray up`: versions, token, ports and folders on them can be checked only then"
        )
    )
    return results


def _check_images(file: ClusterFile) -> list[CheckResult]:
    """Images of the `docker` block: at their registry, and, where they are here too, fit for what is mounted there."""
    docker = file.tree.get("docker") or {}
    head, worker = (docker.get(key) or docker.get("image") for key in ("head_image", "worker_image"))
    names = [name for name in dict.fromkeys((head, worker)) if name]
    if not names:
        return []
    folders = sorted({there.rpartition("/")[0] for there in file.mounts})
    results, seen = [run_check("images", lambda: image.pullable(names))], []

    def look(name: str) -> str:
        found = image.look_into(name, folders)
        if found is None:
            return f"{name} is not here, so that nothing can look into it: pull it to have it checked"
        seen.append(found)
        return image.check(found, is_aws_head=file.provider == "aws" and name == head)

    results += [run_check(f"image {name.rpartition(':')[2]}", partial(look, name)) for name in names]
    if len(seen) > 1:
        results.append(run_check("images' Python", lambda: image.agree(seen)))
    return results


def _check_storage(storage: str | None) -> list[CheckResult]:
    """A URL for runs, tried from here; a folder is looked at where the hosts are."""
    if storage is None or not is_url(storage):
        return []
    return [run_check("storage", lambda: writable_from_here(storage))]


def _aws() -> str:
    if importlib.util.find_spec("boto3") is None:
        raise UserError("boto3 is not installed; Ray speaks to AWS through it: pip install boto3")
    import boto3  # type: ignore[import-not-found,unused-ignore]

    credentials = boto3.Session().get_credentials()
    if credentials is None:
        raise UserError("no AWS credentials found; `aws configure`, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    return f"found ({credentials.method})"
