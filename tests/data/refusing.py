"""What cannot be read is refused, in words."""

import pytest

from thinwire.errors import DataError


def refused(words, act, *arguments, **options):
    with pytest.raises(DataError, match=words):
        act(*arguments, **options)
