"""Every public method says what it is for, or overrides one that does."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import thinwire


def methods() -> Iterator[tuple[str, object]]:
    """The public methods and properties that the package defines, by dotted name."""
    for info in pkgutil.walk_packages(thinwire.__path__, "thinwire."):
        if info.name.endswith("__main__"):
            continue  # it would run
        module = importlib.import_module(info.name)
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == info.name:
                for name, value in vars(kind).items():
                    is_method = inspect.isroutine(value) and getattr(kind, name).__name__ == name
                    is_public = "._" not in f".{kind.__qualname__}.{name}"
                    if is_public and (is_method or isinstance(value, property)):
                        yield f"{info.name}.{kind.__qualname__}.{name}", getattr(kind, name)


def test_methods_have_a_docstring_or_inherit_one() -> None:
    found = dict(methods())
    assert len(found) > 300
    assert [name for name, method in found.items() if not inspect.getdoc(method)] == []
