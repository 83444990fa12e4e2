"""Settings for tests: plain values with single keys changed."""

from typing import Any

from thinwire.settings import Settings

TINY_MODEL = {
    "layers": 4,
    "dim": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 300,
    "context": 16,
}


def with_changes(values: dict[str, dict[str, Any]], changes: dict[str, Any]) -> Settings:
    """`section__key=value` changes one key."""
    for place, value in changes.items():
        section, key = place.split("__")
        values.setdefault(section, {})[key] = value
    return Settings.from_plain(values)
