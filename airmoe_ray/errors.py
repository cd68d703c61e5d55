"""Errors whose message is meant for the person who typed the command.

The command line prints such a message as one line and exits with code 2; anything else is a defect and keeps
its traceback.
"""


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
