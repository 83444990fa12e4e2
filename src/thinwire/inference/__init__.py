"""A trained model at work: its loss, its text, a conversation, an endpoint."""

from thinwire.inference.model import Model, Sampling
