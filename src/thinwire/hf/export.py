"""`thinwire export`: a checkpoint as a folder that transformers opens, or its adapters for peft.

The folder is written under a hidden name beside its own, verified, and renamed at the end. People
publish such folders: no path of the machine that trained the model goes into one. One of them is
what the lm-eval harness measures: the model by its weights, without what codecs do at its cuts.
"""

import contextlib
import dataclasses
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import thinwire
from thinwire.data import Tokenizer, chat
from thinwire.data.sources import read_json
from thinwire.engine.build import Joined, choose_device, model_weights
from thinwire.engine.checkpoint import IMPORTED, TOKENIZER, Checkpoint, checkpoints_folder
from thinwire.engine.conversion import Folded, why_not_folded
from thinwire.engine.state import restore_weights
from thinwire.errors import CheckpointError, ConfigError, DataError, ThinwireError
from thinwire.hf import folder as files
from thinwire.hf.cuts import WithCuts, config_with_cuts
from thinwire.hf.shape import config_of, kind_of
from thinwire.lazy import needs
from thinwire.model import LoraConfig
from thinwire.model.layers import UP, is_adapter
from thinwire.paths import expanded
from thinwire.report import Display
from thinwire.report.human import human_bytes, human_count
from thinwire.report.metrics import Row, lines_of
from thinwire.settings import Settings

Weights = Folded | WithCuts

CARD = "README.md"
SHARD_BYTES = 5_000_000_000
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # before the name that a tensor has in the model, as peft saves it
TOLERANCE = 1e-4  # of the largest logit: two programs add up in another order, and no more
TOKENS, CONTINUED = 256, 24
"""Of the text that is compared, and how many of these the model itself writes."""
AUTO_TOKENIZER, PLAIN_TOKENIZER = "AutoTokenizer", "PreTrainedTokenizerFast"
VERIFYING, MEASURING = "verifying the export", "--lm-eval"
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


def export(checkpoint: Checkpoint, wanted: Wanted, display: Display) -> None:
    """Write the folder, whole and verified, or leave things as they were."""
    files.check_target(wanted.folder, wanted.replace, files.CONFIG)
    if wanted.verify:
        needs("transformers", "hf", "verifying the export (--no-verify leaves it out)")
    checkpoint.verify()
    source, tokenizer = tokenizer_of(checkpoint, wanted.tokenizer)
    why_not, dtype = why_not_folded(checkpoint.settings), files.EXPORT_TYPES[wanted.dtype]
    weights = WithCuts(checkpoint) if why_not else Folded(checkpoint)
    if why_not:
        display.note(
            f"this model does not fold into an ordinary Llama. It has {why_not}.\n"
            "It is exported with its cuts: after `import thinwire.hf`, which registers its class, "
            "AutoModelForCausalLM opens it"
        )
    with files.new_folder(wanted.folder) as folder:
        settings = weights.settings
        ends = write_tokenizer(folder, source, tokenizer, settings)
        config = {
            **(config_with_cuts(settings) if why_not else config_of(settings.model)),
            # Said even if there are none, or the class of the model names some of its own; but not
            # the one for padding, which transformers would take out of training.
            **{key: ends.get(key) for key in ("bos_token_id", "eos_token_id")},
            "use_cache": True,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "thinwire_version": thinwire.__version__,
        }
        files.write_json(folder / files.CONFIG, config)
        size = human_bytes(sum(map(math.prod, weights.shapes.values())) * dtype.itemsize)
        display.phase("write", f"{len(weights.shapes)} tensors, {size} in {wanted.dtype}")
        files.write_model(folder, weights.shapes, dtype, weights.tensor, wanted.shard_bytes)
        opener, verdict = AUTO_TOKENIZER, ""
        if wanted.verify:
            display.phase("verify", "opening it with transformers")
            opener = tokenizer_class(folder, tokenizer)
            verdict = verify(folder, weights, dtype, checkpoint, tokenizer)
            display.phase("verify", verdict)
        if opener != AUTO_TOKENIZER:
            display.note(
                f"{AUTO_TOKENIZER} has rules of its own for models of this type, which give "
                f"other ids: open the tokenizer with {opener}, as {CARD} says"
            )
        card = model_card(checkpoint, wanted.folder.name, wanted.dtype, opener, verdict)
        (folder / CARD).write_text(card, encoding="utf-8")


def tokenizer_of(checkpoint: Checkpoint, given: Path | None = None) -> tuple[Path, Tokenizer]:
    """The tokenizer.json that goes along, that of a checkpoint or the given one, and opened."""
    path = given / TOKENIZER if given is not None and given.is_dir() else given
    path = path or checkpoint.tokenizer
    if path is None:
        raise CheckpointError(
            f"{checkpoint.folder} holds no tokenizer (it was trained on token shards without "
            "one): name the one that made them with --tokenizer tokenizer.json"
        )
    tokenizer, vocab = Tokenizer.load(path), checkpoint.settings.model.vocab
    if tokenizer.vocab_size > vocab:
        raise ConfigError(
            f"{path} has {tokenizer.vocab_size} entries, but the model was trained with {vocab}: "
            "it is not the tokenizer of this model"
        )
    return path, tokenizer


def write_tokenizer(folder: Path, source: Path, own: Tokenizer, run: Settings) -> dict[str, Any]:
    """Copy a tokenizer.json and what is beside it, or make it; returns the generation config."""
    shutil.copyfile(source, folder / TOKENIZER)
    places, chosen = [source], run.data.tokenizer
    # Training copies the tokenizer and its chat template; what else came with it, such as ways of
    # sampling, is where `data.tokenizer` found it.
    with contextlib.suppress(ThinwireError):
        if chosen and Tokenizer.load(chosen).digest == own.digest:
            places.append(expanded(chosen, "data.tokenizer"))
    for name in files.BESIDE:
        # A template from elsewhere would come before the one in a nearer config.
        is_said = name == chat.JINJA and source.with_name(chat.CONFIG).is_file()
        paths = (place.with_name(name) for place in (places[:1] if is_said else places))
        if (path := next(filter(Path.is_file, paths), None)) is not None:
            shutil.copyfile(path, folder / name)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": run.model.context,
        "clean_up_tokenization_spaces": False,
    }
    if (end := own.end_of_text) is not None:
        config |= dict.fromkeys(("bos_token", "eos_token"), own.decode([end]))
    path = folder / chat.CONFIG
    files.write_json(path, config | (read_json(path) if path.is_file() else {}))
    known = read_json(folder / files.GENERATION) if (folder / files.GENERATION).is_file() else {}
    if source.with_name(files.GENERATION).is_file():
        return known
    ends = {end} if end is not None else set()
    with contextlib.suppress(DataError):  # no chat template, or one for another program
        ends |= chat.Chat(own, chat.ChatTemplate.chosen("tokenizer", folder / TOKENIZER)).end_ids
    if known:  # of the model that the run began with, whose template may have been another
        said = known.get("eos_token_id")
        ends |= {each for each in (said if isinstance(said, list) else [said]) if each is not None}
    elif ends:
        # Training puts one token between texts: it ends one and begins the next.
        known = {} if end is None else {"bos_token_id": end}
        known["pad_token_id"] = min(ends) if end is None else end
    if ends:
        known["eos_token_id"] = sorted(ends) if len(ends) > 1 else min(ends)
    files.write_json(folder / files.GENERATION, known)
    return known


def verify(
    folder: Path, weights: Weights, dtype: torch.dtype, checkpoint: Checkpoint, own: Tokenizer
) -> str:
    """Open a folder of weights with transformers; CheckpointError says by how much it is off.
    What was written must be the weights, rounded. Before rounding, they must give the trained
    model's logits for a text that the folder itself continues, each token of it also the trained
    model's choice. One model is in memory at a time, in float32.
    """
    most = min(TOKENS, checkpoint.settings.model.context)
    more = min(CONTINUED, most // 2)
    known = own.encode(SAMPLE)[: most - more] or [0]  # a vocabulary may have none of it
    prompt = torch.tensor([known])
    transformers = needs("transformers", "hf", VERIFYING)
    with torch.no_grad(), _quiet():
        auto = transformers.AutoModelForCausalLM
        # By its old name, which every version of transformers understands.
        theirs = auto.from_pretrained(folder, torch_dtype=torch.float32).eval()
        rounded_TV = theirs(prompt).logits[0].float()
        _restore_weights(theirs, weights, dtype)
        # Greedy, whatever ways of sampling the folder recommends.
        ends = theirs.generation_config.eos_token_id
        theirs.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=0)
        mask = torch.ones_like(prompt)
        text = theirs.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=more)
        theirs_TV = theirs(text).logits[0].float()
        del theirs
        ours_TV = trained_model(checkpoint).logits(text, compressed=False)[0].float()
    start = prompt.shape[1]
    largest, difference, rounded = (
        float(logits_TV.abs().max())
        for logits_TV in (ours_TV, theirs_TV - ours_TV, rounded_TV - ours_TV[:start])
    )
    if not math.isfinite(largest):
        raise CheckpointError(
            f"the logits of {checkpoint.folder} are not finite: training has ruined its weights; "
            "export an earlier checkpoint"
        )
    limit = TOLERANCE * max(1.0, largest)
    if not difference <= limit:  # NaN is none
        raise CheckpointError(
            f"the exported model is not the trained one: logits differ by up to {difference:.3g}, "
            f"and rounding explains {limit:.1e} at most"
        )
    ahead_NV, chosen_N1 = ours_TV[start - 1 : -1], text[0, start:, None]
    gap = float((ahead_NV.max(-1).values - ahead_NV.gather(-1, chosen_N1)[:, 0]).max())
    if gap > 2 * limit:  # more than rounding explains
        raise CheckpointError(
            "the exported model continues a text differently: it chose a token whose logit in the "
            f"trained model is {gap:.3g} below the largest"
        )
    before = f" (before rounding; rounding changes them by at most {rounded:.1e})"
    return (
        f"logits of {text.shape[1]} tokens of a sample text differ by at most {difference:.1e}"
        f"{before if dtype != torch.float32 else ''}, and the greedy continuation is the same"
    )


def tokenizer_class(folder: Path, tokenizer: Tokenizer) -> str:
    """The class of transformers that opens the tokenizer as it was trained with."""
    ours = tokenizer.encode(SAMPLE)
    # For some types of models the first has rules of its own in place of a tokenizer.json.
    for name in (AUTO_TOKENIZER, PLAIN_TOKENIZER):
        opener = getattr(needs("transformers", "hf", VERIFYING), name)
        with _quiet():
            theirs = opener.from_pretrained(folder).encode(SAMPLE, add_special_tokens=False)
        if theirs == ours:
            return name
    raise CheckpointError(
        "the exported tokenizer is not the one of training: for a sample text transformers gives "
        f"the ids {theirs[:10]} ..., training has {ours[:10]} ..."
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


def _restore_weights(model: Any, weights: Weights, dtype: torch.dtype) -> None:
    """What transformers has loaded must be what was written; then it is as before rounding."""
    state, names = model.state_dict(), weights.shapes.keys()
    if state.keys() != names:
        odd = sorted(state.keys() ^ names)
        raise CheckpointError(
            f"transformers has other tensors in this model than were exported, such as {odd[0]}"
        )
    for name in names:
        tensor = weights.tensor(name)
        if not torch.equal(state[name], tensor.to(dtype).float()):
            raise CheckpointError(f"transformers has loaded other values of {name} than exported")
        state[name].copy_(tensor)


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


def model_card(checkpoint: Checkpoint, name: str, dtype: str, tokenizer: str, verdict: str) -> str:
    """The whole text; `verdict` says how it was verified, if it was."""
    settings, stages = checkpoint.settings, checkpoint.settings.pipeline.stages
    facts = "\n".join(f"| {key} | {value} |" for key, value in _facts(checkpoint).items())
    # Of the model as it is exported: adapters are merged.
    parameters = model_weights(dataclasses.replace(settings, lora=LoraConfig())).count
    title, about = "How it was trained", f"trained with thinwire in {stages} pipeline stages"
    if origin := checkpoint.manifest.get(IMPORTED):
        title, about = "What it is", f"imported into thinwire from `{origin}`"
    checked = f"\nVerified when it was exported: {verdict}.\n" if verdict else ""
    tag, needed, register = f"- {kind_of(settings.model)}\n", "", ""
    if why_not_folded(settings):
        tag, register = "", "import thinwire.hf  # registers the model class\n"
        needed = (
            "Its cuts are part of the model and do not fold into the weights of an ordinary "
            "Llama, so it needs\n`pip install 'thinwire[hf]'`:\n\n"
        )
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- thinwire
{tag}---

# {name}

A language model of {human_count(parameters)} parameters, \
{about} and exported in {dtype}.

{needed}```python
{register}from transformers import AutoModelForCausalLM, {tokenizer}

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = {tokenizer}.from_pretrained("{name}")
```
{checked}
## {title}

| | |
|---|---|
{facts}
"""


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
    lora, boundary, cuts = settings.lora, settings.boundary, settings.pipeline.stages - 1
    kind = f"`{boundary.mode}` of rank {boundary.rank}, anchor `{boundary.anchor}`"
    kind = "dense" if boundary.mode == "dense" else kind
    place = settings.train.init_from  # of which its name is said, without the path to it
    facts: dict[str, Any] = {
        "model": shape,
        "steps": f"{step:,} of {settings.train.steps:,}",
        "tokens": f"{step * settings.tokens_per_step:,}, {settings.tokens_per_step:,} per step",
        "started from": place and f"`{Path(place).name}`",
        "data": f"source `{data.source}`" + (f", fingerprint `{corpus}`" if corpus else ""),
        "validation loss": _validation_loss(checkpoint),
        "optimizer": f"{optim.name}, learning rate {optim.lr:g}, weight decay "
        f"{optim.weight_decay:g}, warmup {optim.warmup} steps, clip {optim.clip:g}",
        "adapters": lora.rank
        and f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, beside {', '.join(lora.targets)}; "
        "merged into the weights",
        "precision": settings.run.precision,
        "seed": str(settings.run.seed),
        "cuts": f"{cuts}, {kind}" if cuts else "none",
        "codecs": cuts
        and f"`{settings.codec.forward}` forward, `{settings.codec.backward}` back "
        "(in training only: not part of this model)",
        "settings hash": f"`{settings.hash}`",
        "thinwire": thinwire.__version__,
    }
    return {key: fact for key, fact in facts.items() if fact}


def _validation_loss(checkpoint: Checkpoint) -> str:
    """The last one before the checkpoint, where that lies in the folder of its run."""
    run, found = checkpoint.folder.parent.parent, ""
    if checkpoint.folder.parent == checkpoints_folder(run):
        for row in filter(None, map(Row.read, lines_of(run))):
            if row.kind == "evaluation" and row.loss is not None and row.step <= checkpoint.step:
                found = f"{row.loss:.4f} (step {row.step:,})"
    return found


def _refuse_other_base(base: str, checkpoint: Checkpoint, folded: Folded) -> None:
    """Adapters fit the weights that they were trained beside, rounded as their folder has them."""
    theirs = files.FolderWeights(Path(base))
    for name in sorted(theirs.listed.keys() & folded.names()):
        has_adapter = f"{name.removesuffix('weight')}{UP}.weight" in checkpoint.names()
        kept = folded.in_full(name, checkpoint.tensor(name)) if has_adapter else folded.tensor(name)
        own = theirs.read(name)
        if not torch.equal(kept.to(own.dtype), own):
            raise ConfigError(
                f"the adapters of {checkpoint.folder} do not fit {base}: {name} has other values "
                "there than in their training: name an export of the model that it started from"
            )


def export_adapter(checkpoint: Checkpoint, wanted: Wanted, base: str, display: Display) -> None:
    """Write what a LoRA run has trained as a folder for peft; `base` names the model below."""
    files.check_target(wanted.folder, wanted.replace, ADAPTER_CONFIG)
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
    dtype = files.EXPORT_TYPES[wanted.dtype]
    folded, found = Folded(checkpoint), {}
    names = {n for n in checkpoint.names() if is_adapter(n) and n.endswith(".weight")}
    if (Path(base) / files.CONFIG).is_file():
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
    with files.new_folder(wanted.folder) as folder:
        save_file(found, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (folder / ADAPTER_WEIGHTS).chmod(0o644)
        files.write_json(folder / ADAPTER_CONFIG, config)


def run_tasks(
    place: Path,
    tasks: list[str],
    display: Display,
    device: str = "auto",
    limit: int = 0,
    folder: Path | None = None,
    allow_plugins: bool = False,
) -> dict[str, dict[str, Any]]:
    """Scores by task and metric, of `limit` examples each (0: all); `folder` has more tasks."""
    harness = needs("lm_eval", "eval", MEASURING)
    needs("transformers", "hf", MEASURING)
    tasks_of = needs("lm_eval.tasks", "eval", MEASURING).TaskManager
    manager = tasks_of(include_path=str(folder) if folder else None)
    for task in tasks:
        if not manager.match_tasks([task]):
            raise ConfigError(
                f"the lm-eval harness has no task {task!r}: `python -m lm_eval ls tasks` lists "
                "them, and --tasks-folder adds a folder of your own"
            )
    with tempfile.TemporaryDirectory(prefix="thinwire-eval-") as scratch:
        model = place
        if not (place / files.CONFIG).is_file():  # no exported model yet
            checkpoint = Checkpoint.open(place, allow_plugins)
            model = Path(scratch) / checkpoint.settings.run.name
            export(checkpoint, Wanted(model, verify=False), display)
        display.phase("lm-eval", f"{', '.join(tasks)} on {place}")
        found = harness.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(model), "dtype": "float32"},
            tasks=tasks,
            device=str(choose_device(device, 0)),
            limit=limit or None,
            task_manager=manager,
            log_samples=False,
        )
    return found["results"]


def scores_text(results: dict[str, dict[str, Any]]) -> str:
    """A line for each number of each task."""
    lines = []
    for task, scores in results.items():
        for metric, value in scores.items():
            name, _, _ = metric.partition(",")
            if isinstance(value, float) and not name.endswith("_stderr"):
                error = scores.get(metric.replace(name, f"{name}_stderr", 1))
                spread = f" ± {error:.4f}" if isinstance(error, float) else ""
                lines.append(f"{task}: {name} {value:.4f}{spread}")
    return "\n".join(lines)
