"""What cannot be read is refused, in words."""

from collections.abc import Callable
from typing import Any

import pytest

from thinwire.errors import DataError


def refused(words: str, act: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    with pytest.raises(DataError, match=words):
        act(*arguments, **options)
