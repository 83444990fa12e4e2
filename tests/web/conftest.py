"""Fixtures of all tests of pages."""

from webruns import finished, host, run_folder, serve

__all__ = ["finished", "host", "run_folder", "serve"]
