"""Waiting for what other threads bring about, for tests of all rooms."""

import time

# Seconds; only ever reached by a test that fails, however loaded the machine is.
PATIENCE = 90.0  # for threads
PROCESS_PATIENCE = 400.0  # for processes, which import torch first


def wait_until(holds, patience=PATIENCE):
    deadline = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)
