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
class Answers:
    """What a model says: logits of a text, and how it continues its beginning."""

    logits_TV: Tensor
    continued: list[int]
    ahead: list[Tensor]
    """The logits from which each token of the continuation was chosen."""


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
    before they are rounded, they must give the trained model's logits.
    """
    text, ids = _text_for(checkpoint, tokenizer.tokenizer)
    opener = tokenizer_class(folder, tokenizer.tokenizer)
    ours = _answers_of_ours(checkpoint, ids, tokenizer.generation().get("eos_token_id"))
    largest = float(ours.logits_TV.abs().max())
    if not math.isfinite(largest):
        raise CheckpointError(
            f"the logits of {checkpoint.folder} are not finite: training has ruined its weights; "
            "export an earlier checkpoint"
        )
    with _quiet():
        auto = needs("transformers", "hf", VERIFYING).AutoModelForCausalLM
        # By its old name, which every version of transformers understands.
        theirs = auto.from_pretrained(folder, torch_dtype=torch.float32).eval()
    _check_weights(theirs, weights, dtype)
    rounding = None
    with torch.no_grad():
        if dtype != torch.float32:
            rounding = _difference(theirs, ids, ours.logits_TV)
            for name, tensor in theirs.state_dict().items():  # as it was before it was rounded
                tensor.copy_(weights.tensor(name))
        difference = _difference(theirs, ids, ours.logits_TV)
    verdict = Verified(difference, largest, ids.shape[1], text, rounding, opener)
    if not difference <= verdict.limit:  # NaN is none
        raise CheckpointError(
            f"the exported model is not the trained one: logits differ by up to {difference:.3g}, "
            f"and rounding explains {verdict.limit:.1e} at most"
        )
    _check_text(theirs, ids, ours, verdict)
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


def _answers_of_ours(checkpoint: Checkpoint, ids: Tensor, end: int | list[int] | None) -> Answers:
    model = trained_model(checkpoint)
    ends = {end} if isinstance(end, int) else set(end or ())
    with torch.no_grad():
        logits_TV = model.logits(ids, compressed=False)[0].float()
        pasts = [stage.new_past() for stage in model.stages]
        prompt = _prompt(ids)
        new, chosen, ahead = prompt, [], []
        for _ in range(min(CONTINUED, checkpoint.settings.model.context - prompt.shape[1])):
            logits_V = model.logits(new, False, pasts)[0, -1].float()
            chosen.append(int(logits_V.argmax()))
            ahead.append(logits_V)
            if chosen[-1] in ends:
                break
            new = torch.tensor([[chosen[-1]]])
    return Answers(logits_TV, chosen, ahead)


def trained_model(checkpoint: Checkpoint) -> Joined:
    """The model of a checkpoint as it was trained, without codecs, in float32 on the CPU."""
    run = dataclasses.replace(checkpoint.settings.run, precision="fp32", compile=False)
    settings = dataclasses.replace(checkpoint.settings, run=run)
    model = Joined(settings, torch.device("cpu"))
    for stage in model.stages:
        restore_weights(stage, model.builder.space, checkpoint)
        stage.eval()
    return model


def _prompt(ids: Tensor) -> Tensor:
    return ids[:, : max(1, min(PROMPT, ids.shape[1] // 2))]


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


def _difference(model: Any, ids: Tensor, logits_TV: Tensor) -> float:
    return float((model(ids).logits[0].float() - logits_TV).abs().max())


def _check_text(model: Any, ids: Tensor, ours: Answers, verdict: Verified) -> None:
    """The same greedy text, whatever ways of sampling the folder recommends."""
    prompt = _prompt(ids)
    ends = model.generation_config.eos_token_id
    plain = needs("transformers", "hf", VERIFYING).GenerationConfig
    model.generation_config = plain(eos_token_id=ends, pad_token_id=0)
    with torch.no_grad(), _quiet():
        generated = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=len(ours.continued),
        )
    theirs = generated[0, prompt.shape[1] :].tolist()
    for place, (own, other) in enumerate(zip(ours.continued, theirs, strict=False)):
        if own == other:
            continue
        gap = float(ours.ahead[place][own] - ours.ahead[place][other])
        if gap <= 2 * verdict.limit:
            return  # a tie: either choice is right, and what follows it differs
        raise CheckpointError(
            f"the exported model continues a text differently: token {place + 1} is {other}, "
            f"where the trained model has {own}, by {gap:.3g}"
        )
    if len(theirs) != len(ours.continued):
        raise CheckpointError(
            f"the exported model ends a text after {len(theirs)} tokens, the trained one after "
            f"{len(ours.continued)}"
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
