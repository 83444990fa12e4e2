"""How large attention logits grow over a run, block by block: where runs with Muon fall behind.

    python lab/tools/attention_growth.py growth.jsonl --recipe "thin100 model.qk_norm=false" \\
        --steps 4200 --stop 1300 --seed 3 --set model.preset=160m --set data.path=corpus/ ...

Trains a recipe in one process and writes a line of JSON for each step: its training loss, and at
every look the validation loss, the largest attention logit of each block, and the least entropy
that any of its heads has, on the first sequences of the validation text. `--stop` ends a run in the
middle of its schedule.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.build import choose_device
from thinwire.engine.chain import Chain
from thinwire.engine.feed import Feed
from thinwire.model.llama import Attention, Block, rotate
from thinwire.report import PlainDisplay
from thinwire.run.start import prepare_data
from thinwire_lab.arms import base_of, small_settings
from thinwire_lab.recipe_arms import recipe_grid, with_rates

SEQUENCES = 4  # looked at


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the file of JSON lines to write")
    parser.add_argument("--recipe", default="thin32", help="a recipe, and settings behind its name")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200, help="of the learning-rate schedule")
    parser.add_argument("--stop", type=int, default=0, help="end after so many steps; 0 = all")
    parser.add_argument("--every", type=int, default=50, help="steps from one look to the next")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    options.name = "convergence"  # whose settings these are
    chain = chain_of(options)
    with options.out.open("w") as file:
        for step in range((options.stop or options.steps) + 1):
            row: dict[str, Any] = {"step": step}
            if step % options.every == 0:
                row |= {"valid": chain.evaluate(), "attention": look(chain)}
                print(f"step {step}: validation loss {row['valid']:.4f}, {told(row['attention'])}")
            if step < (options.stop or options.steps):
                row["loss"] = chain.train_step(step)
            file.write(json.dumps(row) + "\n")


def chain_of(options: argparse.Namespace) -> Chain:
    """The recipe's stages in this process, at their start."""
    base = with_rates(base_of(options, small_settings("small")))
    lrs, stages, seeds = [base["optim"]["lr"]], [options.stages], [options.seed]
    (arm,) = (
        found
        for found in recipe_grid(options.recipe, base, lrs, stages, seeds, options.steps)
        if found.label == options.recipe
    )
    settings = arm.settings(base)
    corpus = prepare_data(settings, PlainDisplay(sys.stderr))
    return Chain(settings, Feed(corpus, settings, choose_device(settings.run.device, 0)))


@torch.no_grad()
def look(chain: Chain) -> dict[str, dict[str, float]]:
    """Of each block: its largest logit, and the entropy of its head that looks at the fewest."""
    found: dict[str, dict[str, float]] = {}
    hooks = [
        layer.self_attn.register_forward_pre_hook(watcher(name, found))
        for stage in chain.stages
        for name, layer in zip(stage.names, stage.layers, strict=True)
        if isinstance(layer, Block)
    ]
    assert chain.feed is not None, "the chain trains"
    ids = chain.feed.validation(0).inputs[:SEQUENCES]
    # With pasts layers are not compiled, and what is called inside them can be watched.
    chain.logits(ids, compressed=False, pasts=[stage.new_past() for stage in chain.stages])
    for hook in hooks:
        hook.remove()
    return found


def watcher(name: str, found: dict[str, dict[str, float]]) -> Callable[..., None]:
    """Notes the logits of a block's attention, whenever it is called."""

    def note(attention: Attention, given: tuple[Tensor, ...]) -> None:
        x_BTD, cos_TE, sin_TE, *_ = given
        batch, context, _ = x_BTD.shape
        q_BHTE = attention.q_proj(x_BTD).view(batch, context, attention.heads, -1).transpose(1, 2)
        k_BKTE = attention.k_proj(x_BTD).view(batch, context, attention.kv_heads, -1)
        k_BKTE = k_BKTE.transpose(1, 2)
        if attention.qk_norm:
            q_BHTE, k_BKTE = attention.q_norm(q_BHTE), attention.k_norm(k_BKTE)
        q_BHTE, k_BKTE = (rotate(each, cos_TE, sin_TE).float() for each in (q_BHTE, k_BKTE))
        k_BHTE = k_BKTE.repeat_interleave(attention.heads // attention.kv_heads, dim=1)
        logits = q_BHTE @ k_BHTE.mT / attention.head_dim**0.5
        future = torch.ones(context, context, dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(future, -math.inf)
        entropy_H = torch.special.entr(logits.softmax(-1)).sum(-1).mean((0, 2))
        found[name] = {
            "largest_logit": float(logits.amax()),
            "least_entropy": float(entropy_H.amin()),
        }

    return note


def told(attention: dict[str, dict[str, float]]) -> str:
    """The block whose logits are the largest."""
    name = max(attention, key=lambda block: attention[block]["largest_logit"])
    return f"largest logit {attention[name]['largest_logit']:.1f} in {name}"


if __name__ == "__main__":
    main()
