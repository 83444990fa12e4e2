"""The loss, and the score of a validation: every token that counts weighs the same."""

import torch
from torch.nn import functional as F

from thinwire.model import Score, token_loss


def test_the_loss_is_the_mean_over_tokens_in_float32_at_least():
    generator = torch.Generator().manual_seed(1)
    logits_BTV = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    targets_BT = torch.randint(5, (2, 3), generator=generator)
    chosen = [
        logits_BTV[b, t].softmax(-1)[targets_BT[b, t]].log() for b in range(2) for t in range(3)
    ]
    assert abs(token_loss(logits_BTV, targets_BT) + sum(chosen) / 6) < 1e-14
    narrow = logits_BTV.bfloat16()
    assert token_loss(narrow, targets_BT).dtype == torch.float32
    assert torch.equal(token_loss(narrow, targets_BT), token_loss(narrow.float(), targets_BT))


def test_batches_weigh_by_what_counts_in_them():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (10,), generator=generator)
    filled = torch.cat((labels, torch.tensor([-100, -100])))
    padded = torch.cat((logits, logits[:2]))
    score = Score()
    for at in range(0, 12, 6):
        part, targets = padded[at : at + 6], filled[at : at + 6]
        score.add(token_loss(part, targets), targets)
    assert abs(score.loss - F.cross_entropy(logits, labels).item()) < 1e-14
    assert score.count == 10
