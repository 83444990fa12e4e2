"""Imports that wait until they are needed: optional packages, and names of ours beside which torch
is imported, for which commands that compute nothing must not wait.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from thinwire.errors import MissingPackageError


def on_first_use(package: str, *modules: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package: what it is asked for is in one of these of its modules."""

    def get(name: str) -> Any:
        for module in () if name.startswith("_") else modules:
            found = vars(importlib.import_module(f"{package}.{module}"))
            if name in found:
                setattr(sys.modules[package], name, found[name])  # the next use finds it there
                return found[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


def needs(module: str, extra: str, what: str) -> Any:
    """Import an optional package where it is used; if it is missing, the error names the extra.
    `what` begins the message: who needs the package.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        what_helps = f"cannot be imported ({error}): pip install --force-reinstall {package}"
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            what_helps = f"is not installed: pip install 'thinwire[{extra}]'"
        raise MissingPackageError(f"{what} needs {package}, which {what_helps}") from error
