"""A stage's state as a whole: a copy of it, and a hash of every bit; and sets of tensors."""

import hashlib

import torch

from thinwire.engine.checkpoint import Snapshot


def snapshot(state, settings):
    """A copy that later steps do not change."""
    tensors = {name: tensor.detach().clone() for name, tensor in state.tensors().items()}
    return Snapshot(tensors, settings, state.step, state._update.latest.versions)


def fingerprint(state):
    """A hash of every bit of it, and of the numbers of its step and versions."""
    digest = hashlib.sha256(f"step {state.step}, {state._update.latest.versions}".encode())
    for name, tensor in sorted(state.tensors().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def are_equal(first, second):
    """The same names, and the same bits under each."""
    return first.keys() == second.keys() and all(
        torch.equal(t, second[n]) for n, t in first.items()
    )
