"""Models from the Hugging Face hub: the files of a checkpoint and no others, so nothing in a repository is ever run."""

import re
from pathlib import Path

from airmoe_ray.errors import CheckpointError

FILES = ["config.yaml", "model.json", "cloud.safetensors", "experts/expert_*.safetensors", "CARD.md"]
_ID = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a repository's, `org/name`."""
    return _ID.fullmatch(name) is not None


def fetch_from_hub(name: str) -> Path:
    """The checkpoint of a repository of the hub, in the hub's own cache; what is there already is not fetched again."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ModuleNotFoundError:
        raise CheckpointError(
            f"{name}: not a folder here; to fetch it from the hub, pip install huggingface_hub"
        ) from None
    try:
        folder = Path(snapshot_download(name, allow_patterns=FILES))
    except GatedRepoError:
        raise CheckpointError(
            f"{name}: the repository is closed to you; ask for access and log in to the hub"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"{name}: neither a folder here nor a repository of the hub; check the name") from None
    except HFValidationError as error:
        raise CheckpointError(f"{name}: not a name that the hub knows ({_line(error)})") from None
    except LocalEntryNotFoundError:  # neither reached nor fetched before
        raise CheckpointError(
            f"{name}: not a folder here, and the hub cannot be reached; check the connection, or give a folder"
        ) from None
    except Exception as error:  # another answer of the hub, a full disk, whatever the transport raises
        raise CheckpointError(f"{name}: cannot be fetched from the hub ({_line(error)})") from None
    if not (folder / "model.json").is_file():
        raise CheckpointError(f"{name}: the repository holds no AirMoE checkpoint (no model.json at its top)")
    return folder


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
