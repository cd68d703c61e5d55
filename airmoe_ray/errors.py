"""Errors whose message is meant for the person who typed the command.

The command line prints such a message as one line and exits with code 2; anything else is a defect and keeps
its traceback.
"""

import errno


class UserError(ValueError):
    """What was given, what was expected, what to do: in one line."""


class ConfigError(UserError):
    """A configuration key or value that cannot be used."""


class DataError(UserError):
    """A dataset folder, image or label that is missing or broken; names the file."""


class MissingFolderError(DataError):
    """A part of a dataset that is not there at all."""


class CheckpointError(UserError):
    """A run or checkpoint folder that is missing, broken, or of another architecture."""


_DISK_TROUBLE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
)


def disk_trouble(error: OSError) -> str | None:
    """A full disk or a place that cannot be written to, as a line for the user; None where it is something else."""
    if error.errno not in _DISK_TROUBLE:
        return None
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror}; make room or choose another place"
