"""Names of a package that are imported when they are first used. Floor 0.

Settings are read by commands that compute nothing, such as `thinwire init`; they must not wait for
torch because a config dataclass lives beside the code that it configures.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any


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
