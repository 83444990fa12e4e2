"""Waiting for what other threads bring about, for tests of all rooms."""

import time
from collections.abc import Callable

PATIENCE = 30.0  # seconds; only ever reached by a test that fails


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)
