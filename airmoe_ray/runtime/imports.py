"""Classes by their dotted path, `package.module:Class`: how code of one's own is named in a setting."""

import importlib
import os
import sys
from typing import TypeVar

from airmoe_ray.errors import UserError

T = TypeVar("T")


def load_class(path: str, kind: type[T], key: str) -> type[T]:
    """The class that a setting names, a subclass of `kind`; the working folder is searched as well."""
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise UserError(f"{key} = {path}: expected package.module:Class")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{key} = {path}: cannot import {module_name} ({error})") from error
    found = getattr(module, name, None)
    if not isinstance(found, type) or not issubclass(found, kind):
        what = "no such class there" if found is None else f"not a {kind.__name__}"
        raise UserError(f"{key} = {path}: {what}; expected a class that is a {kind.__name__}")
    return found
