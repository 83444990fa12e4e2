"""`thinwire export`: a checkpoint as a folder that transformers opens, or its adapters for peft.

The folder is written under a hidden name beside its own, verified, and renamed at the end. People
publish such folders: no path of the machine that trained the model goes into one.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

import thinwire
from thinwire.data import Tokenizer
from thinwire.engine.build import Joined, model_weights
from thinwire.engine.checkpoint import IMPORTED, Checkpoint, checkpoints_folder
from thinwire.engine.conversion import Folded, why_not_folded
from thinwire.engine.state import restore_weights
from thinwire.errors import CheckpointError, ConfigError
from thinwire.hf.cuts import WithCuts, config_with_cuts
from thinwire.hf.folder import (
    CONFIG,
    EXPORT_TYPES,
    FolderWeights,
    check_target,
    new_folder,
    write_json,
    write_model,
)
from thinwire.hf.shape import config_of, kind_of
from thinwire.hf.tokenizer import GENERATION, TokenizerFiles, corpus_of
from thinwire.lazy import needs
from thinwire.model import LoraConfig
from thinwire.model.adapter import UP, is_adapter
from thinwire.report import Display
from thinwire.report.human import human_bytes, human_count
from thinwire.report.metrics import Row, lines_of
from thinwire.settings import Settings

CARD = "README.md"
SHARD_BYTES = 5_000_000_000
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before the name that a tensor has in the model, as peft saves it."""
_OPENING = """\
```python
{register}from transformers import AutoModelForCausalLM, {tokenizer}

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = {tokenizer}.from_pretrained("{name}")
```
"""
_REGISTER = "import thinwire.hf  # registers the model class\n"
_WITH_CUTS = """\
Its cuts are part of the model and do not fold into the weights of an ordinary Llama, so it needs
`pip install 'thinwire[hf]'`:

"""
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
class Wanted:
    """How a checkpoint is to be exported."""

    folder: Path
    dtype: str = "fp32"
    replace: bool = False
    verify: bool = True
    tokenizer: Path | None = None
    shard_bytes: int = SHARD_BYTES


class Verified(NamedTuple):
    """How near the exported model is to the trained one, and what opens its tokenizer."""

    words: str
    tokenizer_class: str


def export(checkpoint: Checkpoint, wanted: Wanted, display: Display) -> None:
    """Write the folder, whole and verified, or leave things as they were."""
    check_target(wanted.folder, wanted.replace, CONFIG)
    if wanted.verify:
        needs("transformers", "hf", "verifying the export (--no-verify leaves it out)")
    checkpoint.verify()
    tokenizer = TokenizerFiles(checkpoint, wanted.tokenizer)
    why_not, dtype = why_not_folded(checkpoint.settings), EXPORT_TYPES[wanted.dtype]
    weights = WithCuts(checkpoint) if why_not else Folded(checkpoint)
    if why_not:
        display.note(
            f"this model does not fold into an ordinary Llama. It has {why_not}.\n"
            "It is exported with its cuts: after `import thinwire.hf`, which registers its class, "
            "AutoModelForCausalLM opens it"
        )
    with new_folder(wanted.folder) as folder:
        model, ends = weights.settings.model, tokenizer.generation()
        config = {
            **(config_with_cuts(weights.settings) if why_not else config_of(model)),
            # Said even if there are none, or the class of the model names some of its own.
            **dict.fromkeys(("bos_token_id", "eos_token_id")),
            # Not the one for padding: transformers would take it out of training.
            **{key: value for key, value in ends.items() if key != "pad_token_id"},
            "use_cache": True,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "thinwire_version": thinwire.__version__,
        }
        write_json(folder / CONFIG, config)
        tokenizer.write(folder)
        if not (folder / GENERATION).exists():
            write_json(folder / GENERATION, ends)
        size = human_bytes(sum(map(math.prod, weights.shapes.values())) * dtype.itemsize)
        display.phase("write", f"{len(weights.shapes)} tensors, {size} in {wanted.dtype}")
        write_model(folder, weights.shapes, dtype, weights.tensor, wanted.shard_bytes)
        found = None
        if wanted.verify:
            display.phase("verify", "opening it with transformers")
            found = verify(folder, weights, dtype, checkpoint, tokenizer)
            display.phase("verify", found.words)
            if found.tokenizer_class != AUTO_TOKENIZER:
                display.note(
                    f"{AUTO_TOKENIZER} has rules of its own for models of this type, which give "
                    f"other ids: open the tokenizer with {found.tokenizer_class}, as {CARD} says"
                )
        card = model_card(checkpoint, wanted.folder.name, wanted.dtype, not why_not, found)
        (folder / CARD).write_text(card, encoding="utf-8")


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
    largest = _most(ours_TV)
    if not math.isfinite(largest):
        raise CheckpointError(
            f"the logits of {checkpoint.folder} are not finite: training has ruined its weights; "
            "export an earlier checkpoint"
        )
    difference, limit = _most(theirs_TV - ours_TV), TOLERANCE * max(1.0, largest)
    if not difference <= limit:  # NaN is none
        raise CheckpointError(
            f"the exported model is not the trained one: logits differ by up to {difference:.3g}, "
            f"and rounding explains {limit:.1e} at most"
        )
    start, end = prompt.shape[1], tokenizer.generation().get("eos_token_id")
    new, ends = continued[0, start:].tolist(), {end} if isinstance(end, int) else set(end or ())
    _check_text(new, ahead_TV[start - 1 :], limit)
    due = next((count for count, token in enumerate(new, 1) if token in ends), most)
    if len(new) != due:
        raise CheckpointError(
            f"the exported model ends a text after {len(new)} tokens, the trained one after {due}"
        )
    rounded = ""
    if dtype != torch.float32:
        by = _most(rounded_TV - ours_TV)
        rounded = f" (before rounding; rounding changes them by at most {by:.1e})"
    words = (
        f"logits of {ids.shape[1]} tokens of {text} differ by at most {difference:.1e}{rounded}, "
        "and the greedy continuation is the same"
    )
    return Verified(words, opener)


def _most(difference: Tensor) -> float:
    return float(difference.abs().max())


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


def model_card(
    checkpoint: Checkpoint, name: str, dtype: str, is_plain: bool, verdict: Verified | None
) -> str:
    """The whole text; `verdict` says how it was verified, if it was."""
    settings = checkpoint.settings
    facts = "\n".join(f"| {key} | {value} |" for key, value in _facts(checkpoint).items())
    tags = "tags:\n- thinwire\n" + (f"- {kind_of(settings.model)}\n" if is_plain else "")
    # Of the model as it is exported: adapters are merged.
    parameters = model_weights(dataclasses.replace(settings, lora=LoraConfig())).count
    about = f"A language model of {human_count(parameters)} parameters, "
    if origin := checkpoint.manifest.get(IMPORTED):
        about += f"imported into thinwire from `{origin}`"
    else:
        about += f"trained with thinwire in {settings.pipeline.stages} pipeline stages"
    tokenizer = verdict.tokenizer_class if verdict else AUTO_TOKENIZER
    register = "" if is_plain else _REGISTER
    opening = _OPENING.format(name=name, tokenizer=tokenizer, register=register)
    opening = opening if is_plain else _WITH_CUTS + opening
    checked = f"\nVerified when it was exported: {verdict.words}.\n" if verdict else ""
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n{tags}---\n\n"
        f"# {name}\n\n"
        f"{about} and exported in {dtype}.\n\n"
        f"{opening}{checked}\n"
        f"## {'What it is' if origin else 'How it was trained'}\n\n| | |\n|---|---|\n{facts}\n"
    )


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    settings, step = checkpoint.settings, checkpoint.step
    model, optim, data = settings.model, settings.optim, settings.data
    corpus = checkpoint.manifest["corpus"]
    shape = (
        f"{model.layers} blocks of width {model.dim}, {model.heads} heads ({model.kv_heads} for "
        f"keys and values), feed-forward {model.ffn}, vocabulary {model.vocab}, context "
        f"{model.context}"
    )
    if IMPORTED in checkpoint.manifest:
        return {"model": shape, "thinwire": thinwire.__version__}
    lora, adapters = settings.lora, {}
    if lora.rank:
        about = f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, beside {', '.join(lora.targets)}"
        adapters = {"adapters": f"{about}; merged into the weights"}
    place = settings.train.init_from  # of which its name is said, without the path to it
    facts = {
        "model": shape,
        "steps": f"{step:,} of {settings.train.steps:,}",
        "tokens": f"{step * settings.tokens_per_step:,}, {settings.tokens_per_step:,} per step",
        **({"started from": f"`{Path(place).name}`"} if place else {}),
        "data": f"source `{data.source}`" + (f", fingerprint `{corpus}`" if corpus else ""),
        **_losses(checkpoint),
        "optimizer": f"{optim.name}, learning rate {optim.lr:g}, weight decay "
        f"{optim.weight_decay:g}, warmup {optim.warmup} steps, clip {optim.clip:g}",
        **adapters,
        "precision": settings.run.precision,
        "seed": str(settings.run.seed),
        "cuts": _cuts(settings),
        "codecs": f"`{settings.codec.forward}` forward, `{settings.codec.backward}` back "
        "(in training only: not part of this model)",
        "settings hash": f"`{settings.hash}`",
        "thinwire": thinwire.__version__,
    }
    if settings.pipeline.stages == 1:
        facts.pop("codecs")
    return facts


def _cuts(settings: Settings) -> str:
    boundary, count = settings.boundary, settings.pipeline.stages - 1
    if not count:
        return "none"
    if boundary.mode == "dense":
        return f"{count}, dense"
    anchor = f", token table `{boundary.anchor}`" if boundary.anchor != "none" else ""
    if boundary.shares_embedding:
        anchor = ", around the embedding that all stages share"
    return f"{count}, `{boundary.mode}` of rank {boundary.rank}{anchor}"


def _losses(checkpoint: Checkpoint) -> dict[str, str]:
    """The last losses before the checkpoint, if its run has kept them beside it."""
    run = checkpoint.folder.parent.parent
    found: dict[str, str] = {}
    kinds = {"step": "training", "evaluation": "validation"}
    if checkpoint.folder.parent != checkpoints_folder(run):
        return found
    with contextlib.suppress(OSError):  # a card is not worth failing for
        for row in filter(None, map(Row.read, lines_of(run))):
            if (kind := kinds.get(row.kind)) and row.step <= checkpoint.step:
                loss = math.nan if row.loss is None else row.loss
                found[f"{kind} loss"] = f"{loss:.4f} (step {row.step:,})"
    return found


def _refuse_other_base(base: str, checkpoint: Checkpoint, folded: Folded) -> None:
    """Adapters fit the weights that they were trained beside, rounded as their folder has them."""
    theirs = FolderWeights(Path(base))
    for name in sorted(theirs.listed.keys() & folded.names()):
        has_adapter = f"{name.removesuffix('weight')}{UP}.weight" in checkpoint.names()
        kept = folded.in_full(name, checkpoint.tensor(name)) if has_adapter else folded.tensor(name)
        own = theirs.read(name)
        if not torch.equal(kept.to(own.dtype), own):
            raise ConfigError(
                f"the adapters of {checkpoint.folder} do not fit {base}: {name} has other values "
                "there than in their training. With --base, name an export of the model that the "
                "run started from, as it was then"
            )


def export_adapter(checkpoint: Checkpoint, wanted: Wanted, base: str, display: Display) -> None:
    """Write what a LoRA run has trained as a folder for peft, whole, or leave things as they were.

    The model that it belongs to is not in it; `base` names it for peft.
    """
    check_target(wanted.folder, wanted.replace, ADAPTER_CONFIG)
    settings = checkpoint.settings
    if not settings.lora.rank:
        raise ConfigError(
            f"{checkpoint.folder} has no adapters (lora.rank = 0): all of its weights were "
            "trained. Export the whole model, without --adapter"
        )
    if why := why_not_folded(settings):
        raise ConfigError(
            f"the adapters of {checkpoint.folder} were trained together with its cuts, which a "
            f"plain model lacks. It has {why}. Export the whole model, without --adapter"
        )
    checkpoint.verify()
    dtype = EXPORT_TYPES[wanted.dtype]
    folded, found = Folded(checkpoint), {}
    names = {n for n in checkpoint.names() if is_adapter(n) and n.endswith(".weight")}
    if (Path(base) / CONFIG).is_file():
        display.phase("verify", f"the weights of {base} against those beside the adapters")
        _refuse_other_base(base, checkpoint, folded)
    for name, tensor in sorted(checkpoint.tensors(names).items()):
        layer, part, _ = name.rsplit(".", 2)
        # Beside plain weights a B of coordinates becomes U B.
        whole = folded.in_full(f"{layer}.weight", tensor) if part == UP else tensor
        found[f"{PREFIX}{name}"] = whole.to(dtype).contiguous()
    size = human_bytes(sum(tensor.nbytes for tensor in found.values()))
    display.phase("write", f"{len(found)} tensors of adapters, {size} in {wanted.dtype}")
    lora = settings.lora
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": lora.targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with new_folder(wanted.folder) as folder:
        save_file(found, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (folder / ADAPTER_WEIGHTS).chmod(0o644)
        write_json(folder / ADAPTER_CONFIG, config)
