"""Holds an exported folder against the model that was trained: logits, and text."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.data import Tokenizer
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.conversion import Folded
from thinwire.engine.joined import Joined
from thinwire.engine.state import restore_weights
from thinwire.errors import CheckpointError
from thinwire.hf.cuts import WithCuts
from thinwire.hf.tokenizer import TokenizerFiles, corpus_of
from thinwire.lazy import needs

TOLERANCE = 1e-4
"""Of the largest logit: two programs add up in another order, and no more."""
TOKENS = 256
AUTO_TOKENIZER, PLAIN_TOKENIZER = "AutoTokenizer", "PreTrainedTokenizerFast"
VERIFYING = "verifying the export"
PROMPT, CONTINUED = 16, 24
SAMPLE = """\
The lighthouse keeper wrote down the weather every evening: wind from the north-west, four feet of
swell, a fishing boat that passed at half past six. On the last page of the book he had drawn a map.

def mean(values):
    \"\"\"The arithmetic mean of some numbers.\"\"\"
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

In 1843 she published notes on a machine that was never built; they contain what many call the
first program. "It might act upon other things besides number," she wrote, and few believed her.
"""


@dataclass(frozen=True)
class Verified:
    """How near the two are."""

    difference: float
    largest: float
    tokens: int
    text: str
    rounding: float | None
    tokenizer_class: str

    @property
    def limit(self) -> float:
        """The largest difference that rounding explains."""
        return TOLERANCE * max(1.0, self.largest)

    def __str__(self) -> str:
        rounded = ""
        if self.rounding is not None:
            rounded = f" (before rounding; rounding changes them by at most {self.rounding:.1e})"
        return (
            f"logits of {self.tokens} tokens of {self.text} differ by at most "
            f"{self.difference:.1e}{rounded}, and the greedy continuation is the same"
        )


def verify(
    folder: Path,
    weights: Folded | WithCuts,
    dtype: torch.dtype,
    checkpoint: Checkpoint,
    tokenizer: TokenizerFiles,
) -> Verified:
    """Open a folder of weights with transformers; CheckpointError says by how much it is off.

    One model is in memory at a time, in float32. What was written must be the weights, rounded;
    before they are rounded, they must give the trained model's logits. Of the text that the folder
    continues, each token must be the trained model's own choice.
    """
    text, ids = _text_for(checkpoint, tokenizer.tokenizer)
    opener = tokenizer_class(folder, tokenizer.tokenizer)
    rounding = None
    with torch.no_grad(), _quiet():
        auto = needs("transformers", "hf", VERIFYING).AutoModelForCausalLM
        # By its old name, which every version of transformers understands.
        theirs = auto.from_pretrained(folder, torch_dtype=torch.float32).eval()
        _check_weights(theirs, weights, dtype)
        rounded_TV = theirs_TV = theirs(ids).logits[0].float()
        if dtype != torch.float32:
            for name, tensor in theirs.state_dict().items():  # as it was before it was rounded
                tensor.copy_(weights.tensor(name))
            theirs_TV = theirs(ids).logits[0].float()
        prompt = ids[:, : max(1, min(PROMPT, ids.shape[1] // 2))]
        most = min(CONTINUED, checkpoint.settings.model.context - prompt.shape[1])
        continued = _continued(theirs, prompt, most)
        del theirs
        ours = trained_model(checkpoint)
        ours_TV = ours.logits(ids, compressed=False)[0].float()
        ahead_TV = ours.logits(continued[:, :-1], compressed=False)[0].float()
    largest = float(ours_TV.abs().max())
    if not math.isfinite(largest):
        raise CheckpointError(
            f"the logits of {checkpoint.folder} are not finite: training has ruined its weights; "
            "export an earlier checkpoint"
        )
    if dtype != torch.float32:
        rounding = float((rounded_TV - ours_TV).abs().max())
    difference = float((theirs_TV - ours_TV).abs().max())
    verdict = Verified(difference, largest, ids.shape[1], text, rounding, opener)
    if not difference <= verdict.limit:  # NaN is none
        raise CheckpointError(
            f"the exported model is not the trained one: logits differ by up to {difference:.3g}, "
            f"and rounding explains {verdict.limit:.1e} at most"
        )
    start, end = prompt.shape[1], tokenizer.generation().get("eos_token_id")
    new, ends = continued[0, start:].tolist(), {end} if isinstance(end, int) else set(end or ())
    _check_text(new, ahead_TV[start - 1 :], verdict.limit)
    due = next((count for count, token in enumerate(new, 1) if token in ends), most)
    if len(new) != due:
        raise CheckpointError(
            f"the exported model ends a text after {len(new)} tokens, the trained one after {due}"
        )
    return verdict


def _text_for(checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[str, Tensor]:
    """Ids of the run's own validation text if it is on this machine, else of a sample."""
    most = min(TOKENS, checkpoint.settings.model.context)
    corpus = corpus_of(checkpoint)
    if corpus is not None:
        ids = corpus.valid[:most].astype("int64")
        return "validation text", torch.from_numpy(ids)[None]
    return "a sample text", torch.tensor([tokenizer.encode(SAMPLE)[:most]])


def tokenizer_class(folder: Path, tokenizer: Tokenizer) -> str:
    """The class of transformers that opens the tokenizer as it was trained with.

    For some types of models AutoTokenizer puts rules of its own in place of a tokenizer.json.
    """
    ours = tokenizer.encode(SAMPLE)
    theirs: dict[str, list[int]] = {}
    for name in (AUTO_TOKENIZER, PLAIN_TOKENIZER):
        opener = getattr(needs("transformers", "hf", VERIFYING), name)
        with _quiet():
            opened = opener.from_pretrained(folder)
            theirs[name] = opened.encode(SAMPLE, add_special_tokens=False)
        if theirs[name] == ours:
            return name
    wrong = theirs[AUTO_TOKENIZER]
    pairs = enumerate(zip(wrong, ours, strict=False))
    place = next((number for number, (other, own) in pairs if other != own), 0)
    raise CheckpointError(
        "the exported tokenizer is not the one of training: transformers gives "
        f"{len(wrong)} ids for a sample text, training has {len(ours)}; from place {place} on "
        f"{wrong[place : place + 5]} and {ours[place : place + 5]}"
    )


def trained_model(checkpoint: Checkpoint) -> Joined:
    """The model of a checkpoint as it was trained, without codecs, in float32 on the CPU."""
    run = dataclasses.replace(checkpoint.settings.run, precision="fp32", compile=False)
    settings = dataclasses.replace(checkpoint.settings, run=run)
    model = Joined(settings, torch.device("cpu"))
    for stage in model.stages:
        restore_weights(stage, model.builder.space, checkpoint)
        stage.eval()
    return model


def _check_weights(model: Any, weights: Folded | WithCuts, dtype: torch.dtype) -> None:
    """What transformers has loaded is what was written, bit for bit, and nothing is missing."""
    state, names = model.state_dict(), weights.shapes.keys()
    if state.keys() != names:
        odd = sorted(state.keys() ^ names)
        raise CheckpointError(
            f"transformers has other tensors in this model than were exported, such as {odd[0]}"
        )
    for name in names:
        if not torch.equal(state[name], weights.tensor(name).to(dtype).float()):
            raise CheckpointError(f"transformers has loaded other values of {name} than exported")


def _continued(model: Any, prompt: Tensor, tokens: int) -> Tensor:
    """The prompt and its greedy text, whatever ways of sampling the folder recommends."""
    ends = model.generation_config.eos_token_id
    plain = needs("transformers", "hf", VERIFYING).GenerationConfig
    model.generation_config = plain(eos_token_id=ends, pad_token_id=0)
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=tokens)


def _check_text(continued: list[int], ahead_TV: Tensor, limit: float) -> None:
    """Each token is the likeliest by the logits ahead of it, or as likely but for rounding."""
    for place, (token, logits_V) in enumerate(zip(continued, ahead_TV, strict=True), 1):
        own = int(logits_V.argmax())
        gap = float(logits_V[own] - logits_V[token])
        if gap > 2 * limit:
            raise CheckpointError(
                f"the exported model continues a text differently: token {place} is {token}, "
                f"where the trained model has {own}, by {gap:.3g}"
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Progress bars of transformers are none of our command's output."""
    logging = needs("transformers.utils.logging", "hf", VERIFYING)
    was_on, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_on:
            logging.enable_progress_bar()
