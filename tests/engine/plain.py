"""What a pipeline is compared with: a training loop as anybody would write it."""

import copy
import math

import numpy as np
import torch
from torch.nn import functional as F

from thinwire.data import Order
from thinwire.model import Stage, architecture

TOLERANCE = 1e-10


def order_of(settings, corpus):
    train, pipeline = settings.train, settings.pipeline
    shape = settings.model.context, train.batch, pipeline.microbatches
    return Order(corpus.train, *shape, settings.run.seed, corpus.train_learned)


def learning_rate(settings, step):
    """A linear warm-up, then a cosine to a tenth."""
    optim = settings.optim
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    progress = (step - optim.warmup) / (settings.train.steps - optim.warmup)
    return optim.lr * (0.1 + 0.45 * (1 + np.cos(np.pi * progress)))


def moments_of(parameters):
    return {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in parameters.items()}


@torch.no_grad()
def update_by_hand(parameters, moments, axes, settings, step):
    """Clipping and AdamW, written out; squares of what is held have their mean along an axis."""
    optim, lr = settings.optim, learning_rate(settings, step)
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in parameters.values()))
    clip = min(1.0, optim.clip / (norm + 1e-6))
    for name, p in parameters.items():
        g, (mean, square) = p.grad * clip, moments[name]
        second = g**2
        if name in axes:
            second = second.mean(axes[name], keepdim=True).expand_as(second)
        mean.mul_(0.9).add_(0.1 * g)
        square.mul_(0.95).add_(0.05 * second)
        decay = optim.weight_decay if p.ndim > 1 else 0.0
        scale = (square / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
        p.mul_(1 - lr * decay).sub_(lr * mean / (1 - 0.9 ** (step + 1)) / scale)
        p.grad = None


def plain_loop(settings, corpus, delay=0, refused=-1):
    """An ordinary training loop: whole model, whole batches, torch's own optimizer and clipping.

    Gradients of the first `delay` microbatches of a step are those of the weights before the last
    update. The update of the step `refused` is left out.
    """
    torch.set_num_threads(1)
    model = Stage(architecture(settings.model).layers())
    model.initialise(settings.model, settings.run.seed)
    model.double()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    before = copy.deepcopy(model)
    order = order_of(settings, corpus)
    losses = []
    for step in range(settings.train.steps):
        parts = [order.microbatch(step, m) for m in range(settings.pipeline.microbatches)]
        total, count = torch.zeros((), dtype=torch.float64), 0
        for computed, some in ((before, parts[:delay]), (model, parts[delay:])):
            computed.zero_grad()
            if some:
                inputs = torch.from_numpy(np.concatenate([b.inputs_BT for b in some]))
                flat = torch.from_numpy(np.concatenate([b.targets_BT for b in some])).flatten()
                logits = computed(inputs).flatten(0, 1)
                total += F.cross_entropy(logits, flat, ignore_index=-100, reduction="sum")
                count += int((flat != -100).sum())
        loss = total / count
        loss.backward()
        losses.append(loss.item())
        for weight, used in zip(model.parameters(), before.parameters(), strict=True):
            found = [p.grad for p in (weight, used) if p.grad is not None]
            weight.grad = torch.stack(found).sum(0)
        before.load_state_dict(model.state_dict())
        if step == refused:
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optim.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
    return losses, model.global_parameters()
