"""Imports that wait until they are needed: our own names, and optional packages. Floor 0.

Settings are read by commands that compute nothing, such as `thinwire init`; they must not wait for
torch because a config dataclass lives beside the code that it configures.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from thinwire.errors import MissingPackageError


def on_first_use(package: str, names: dict[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: `names` lists what each of its modules has to offer."""
    modules = {name: module for module, offered in names.items() for name in offered}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next use finds it without asking here
        return value

    return get


def needs(module: str, extra: str, what: str) -> Any:
    """Import an optional package where it is used; if it is missing, the error names the extra.

    `what` begins the message: the command, the key or the file that needs the package.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise MissingPackageError(
                f"{what} needs {package}, which is not installed: pip install 'thinwire[{extra}]'"
            ) from None
        raise MissingPackageError(
            f"{what} needs {package}, which is installed but cannot be imported ({error}): "
            f"pip install --force-reinstall {package}"
        ) from error
