"""Fixtures of all tests of pages."""

import httpx
import pytest
from webruns import finished, host, run_folder, serve

from waiting import PATIENCE

__all__ = ["finished", "host", "patience", "run_folder", "serve"]


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Who asks waits as long as a test does: httpx gives up after 5 s, a page on a host after 2."""
    monkeypatch.setattr("thinwire.web.page.STATUS_SECONDS", PATIENCE)
    for what in ("connect", "read", "write", "pool"):
        monkeypatch.setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, what, PATIENCE)
