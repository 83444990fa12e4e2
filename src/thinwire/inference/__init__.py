"""A trained model at work: its loss, its text, a conversation, an endpoint."""

from thinwire.inference.choice import Sampling
from thinwire.inference.model import Model
from thinwire.inference.text import TextModel

__all__ = ["Model", "Sampling", "TextModel"]
