"""Settings for tests: plain values with single keys changed."""

from typing import Any

from thinwire.settings import Settings


def with_changes(values: dict[str, dict[str, Any]], changes: dict[str, Any]) -> Settings:
    """`section__key=value` changes one key."""
    for place, value in changes.items():
        section, key = place.split("__")
        values.setdefault(section, {})[key] = value
    return Settings.from_plain(values)
