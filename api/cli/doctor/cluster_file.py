"""Reads a file for `ray up`, checks it against Ray's own schema, and says what it will start where."""

import contextlib
import difflib
import io
import ipaddress
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from airmoe_ray.errors import UserError

TOKEN = "~/.ray/auth_token"  # where Ray looks for it
_EXAMPLES = [ipaddress.ip_network(net) for net in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")]  # RFC 5737
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
_PLACEHOLDERS = re.compile(r"[\w.-]*\bexample\.org\b|(?:ami|sg)-0{17}")


@dataclass(frozen=True)
class Served:
    """What the command that starts the front end will serve."""

    run: str = "~/airmoe/run"
    port: int = 8000
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClusterFile:
    """A file that Ray's schema accepts."""

    path: Path
    tree: dict[str, Any]

    @property
    def provider(self) -> str:
        return str(self.tree["provider"]["type"])

    @property
    def hosts(self) -> list[str]:
        """Addresses, the head's first; none where a cloud makes them."""
        provider = self.tree["provider"]
        return [provider["head_ip"], *provider["worker_ips"]] if self.provider == "local" else []

    @property
    def mounts(self) -> dict[str, Path]:
        """Files and folders that are sent: where they go on the hosts, and where they are here."""
        return {there: Path(here).expanduser() for there, here in (self.tree.get("file_mounts") or {}).items()}

    @property
    def volumes(self) -> list[str]:
        """Folders in the container that are folders of the node (`-v NODE:CONTAINER` of `docker`)."""
        docker = self.tree.get("docker") or {}
        options = " ".join(
            str(option) for key, listed in docker.items() if key.endswith("run_options") for option in listed or []
        )
        return [found.rstrip("/") for found in re.findall(r"(?:-v|--volume)[ =]\S+?:([^\s:]+)", options)]

    @property
    def bin(self) -> str | None:
        """Folder of the `ray` that is started on the hosts; None where it is found on the PATH, as in an image."""
        found = re.search(r"(\S+)/ray start", " ".join(self.tree.get("head_start_ray_commands") or []))
        return found[1] if found else None

    @property
    def served(self) -> Served:
        """Run, port and settings in the command that starts the front end."""
        commands = " ".join(self.tree.get("head_start_ray_commands") or [])
        _, found, options = commands.partition("airmoe serve")
        if not found:
            raise UserError(
                f"{self.path}: head_start_ray_commands start no front end; add `airmoe serve --address auto`"
            )
        given = dict(re.findall(r"--(run|port) (\S+)", options))
        return Served(
            run=given.get("run", Served.run).strip("\"'"),
            port=int(given.get("port", Served.port)),
            overrides=tuple(re.findall(r"--set (\S+?)(?=[;\s])", options)),
        )


def read_documents(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file: one for `ray up`, several for Kubernetes."""
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text()) if document is not None]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', error)})") from None
    if not documents or not all(isinstance(document, dict) for document in documents):
        raise UserError(f"{path}: expected a mapping with cluster_name and provider, or Kubernetes objects")
    return documents


def check_schema(path: Path, tree: dict[str, Any]) -> ClusterFile:
    """Check a document against Ray's schema; errors keep Ray's own words, without its traceback."""
    import ray.autoscaler
    from jsonschema import ValidationError, validate
    from ray.autoscaler._private.util import prepare_config, validate_config

    _check_provider(path, tree)
    logging.getLogger("ray.autoscaler").setLevel(logging.ERROR)  # it logs every default that it fills in
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    told = io.StringIO()
    try:
        # as it is, which names the place of a mistake; then as Ray fills it in (min_workers is gone by then)
        validate({key: value for key, value in tree.items() if key != "min_workers"}, schema)
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            validate_config(prepare_config(tree))
    except ValidationError as error:
        raise UserError(f"{path}: {_place(error)}{error.message}{_hint(error)}") from None
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing") from None
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"{path}: Ray cannot use it ({str(error).splitlines()[0]})") from None
    except Exception as error:  # Ray prints what is wrong, and then raises something silent of click's
        lines = [line for line in told.getvalue().splitlines() if line.strip()]
        raise UserError(f"{path}: {lines[-1].strip() if lines else type(error).__name__}") from None
    return ClusterFile(path, tree)


def examples_left(tree: Any) -> list[str]:
    """Addresses, registries and images that are still those of the shipped file."""
    strings = list(_strings(tree))
    found = {text for string in strings for text in _ADDRESS.findall(string)}
    addresses = {text for text in found if any(_parsed(text) in net for net in _EXAMPLES)}
    return sorted(addresses | {text for string in strings for text in _PLACEHOLDERS.findall(string)})


def _check_provider(path: Path, tree: dict[str, Any]) -> None:
    provider = tree.get("provider")
    if not isinstance(provider, dict) or not isinstance(provider.get("type"), str):
        raise UserError(f"{path}: provider.type is missing; expected local, aws or another that Ray knows")
    if provider["type"] != "local":
        return
    head, workers = provider.get("head_ip"), provider.get("worker_ips")
    if not isinstance(head, str) or not isinstance(workers, list) or not all(isinstance(w, str) for w in workers):
        raise UserError(f"{path}: provider local needs head_ip (an address) and worker_ips (a list of addresses)")
    if len({head, *workers}) <= len(workers):
        raise UserError(f"{path}: provider names a host twice; head_ip and worker_ips must all differ")
    if not (tree.get("auth") or {}).get("ssh_user"):
        raise UserError(f"{path}: auth.ssh_user is missing; say who logs in on the hosts")


def _place(error: Any) -> str:
    return ".".join(str(part) for part in error.absolute_path) + ": " if error.absolute_path else ""


def _hint(error: Any) -> str:
    """For an unknown key, the nearest one that Ray knows."""
    if error.validator != "additionalProperties":
        return ""
    known = list(error.schema.get("properties", {}))
    strangers = [key for key in error.instance if key not in known]
    near = difflib.get_close_matches(strangers[0], known, n=1, cutoff=0.5) if strangers else []
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _parsed(text: str) -> Any:
    try:
        return ipaddress.IPv4Address(text)
    except ValueError:
        return ipaddress.IPv4Address(0)
