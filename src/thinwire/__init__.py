"""thinwire: pipeline-parallel training of language models over ordinary internet links."""

__version__ = "0.2.0"
