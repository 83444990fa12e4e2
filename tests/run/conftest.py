"""Fixtures of all tests of runs."""

from hosting import house

__all__ = ["house"]
