"""Names that a package imports on first use are there, and are the names that it promises."""

import importlib

import pytest


@pytest.mark.parametrize("room", ["boundary", "codec", "engine", "model", "optim"])
def test_every_promised_name_can_be_had(room: str) -> None:
    package = importlib.import_module(f"thinwire.{room}")
    for name in package.__all__:
        value = getattr(package, name)
        assert not isinstance(value, type(importlib)), f"{name} is a module"


def test_other_names_are_missing_as_usual() -> None:
    package = importlib.import_module("thinwire.codec")
    with pytest.raises(AttributeError, match=r"module 'thinwire\.codec' has no attribute 'Zipper'"):
        _ = package.Zipper
    with pytest.raises(ImportError, match="Zipper"):
        importlib.import_module("thinwire.codec.Zipper")
