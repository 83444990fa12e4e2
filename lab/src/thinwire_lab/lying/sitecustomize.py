"""A dishonest machine: with this folder on PYTHONPATH, Python changes what a stage sends.

THINWIRE_LIE says how: `scale` its gradients by 1.05, `skip` its updates, send `noise` of the right
norm, or `none`. It begins with the step in the file that THINWIRE_LIE_FROM names, once that is
there. Such a machine also says that it is slow, so that a stand-by follows it first.
"""

import os
from pathlib import Path
from typing import Any

import torch

from thinwire import plan
from thinwire.engine.port import Port
from thinwire.engine.step_end import StageUpdate
from thinwire.wire import FrameKind

LIE, FROM = os.environ["THINWIRE_LIE"], Path(os.environ["THINWIRE_LIE_FROM"])
send_honestly, commit_honestly = Port.send_tensor, StageUpdate.commit
now = [-1]


def lies(lie: str) -> bool:
    """Whether this step is one in which it lies so."""
    return lie == LIE and FROM.exists() and now[0] >= int(FROM.read_text() or "1000000000")


def send(port: Port, kind: FrameKind, tensor: torch.Tensor, step: int, *more: Any) -> None:
    """Send a tensor, or another one."""
    now[0] = step
    own = FrameKind.BACKWARD if port.stage else FrameKind.FORWARD  # the first sends no gradients
    if kind is own and lies("scale"):
        tensor = 1.05 * tensor
    if kind is own and lies("noise"):
        noise = torch.randn_like(tensor)
        tensor = noise * (tensor.norm() / noise.norm())
    send_honestly(port, kind, tensor, step, *more)


def commit(update: StageUpdate, step: int, *more: Any) -> None:
    """Update the weights, or leave them as they are."""
    if not lies("skip"):
        commit_honestly(update, step, *more)
        return
    update.optimizer.zero_grad()
    update.version += 1


Port.send_tensor = send  # type: ignore[method-assign,assignment]
StageUpdate.commit = commit  # type: ignore[method-assign,assignment]
plan.measure_rates = lambda *more: plan.Rates(1e8)
