"""thinwire: pipeline-parallel training of language models over ordinary internet links."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("thinwire")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
