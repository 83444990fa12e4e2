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
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

import thinwire
from thinwire.data import Corpus, Tokenizer
from thinwire.data.chat import CONFIG as TOKENIZER_CONFIG
from thinwire.data.chat import JINJA, Chat, ChatTemplate
from thinwire.engine.build import Joined, choose_device, model_weights
from thinwire.engine.checkpoint import IMPORTED, TOKENIZER, Checkpoint, checkpoints_folder
from thinwire.engine.conversion import Folded, why_not_folded
from thinwire.engine.state import restore_weights
from thinwire.errors import CheckpointError, ConfigError, DataError, ThinwireError
from thinwire.hf.cuts import WithCuts, config_with_cuts
from thinwire.hf.folder import (
    BESIDE,
    CONFIG,
    EXPORT_TYPES,
    GENERATION,
    FolderWeights,
    check_target,
    new_folder,
    read_json,
    write_json,
    write_model,
)
from thinwire.hf.shape import config_of, kind_of
from thinwire.lazy import needs
from thinwire.model import LoraConfig
from thinwire.model.layers import UP, is_adapter
from thinwire.paths import cache_folder, expanded
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
VERIFYING, MEASURING = "verifying the export", "--lm-eval"
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
            # Said even if there are none, or the class of the model names some of its own; but not
            # the one for padding, which transformers would take out of training.
            **{key: ends.get(key) for key in ("bos_token_id", "eos_token_id")},
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


class TokenizerFiles:
    """A tokenizer.json, and what is known beside it, on their way into a folder: that of a
    checkpoint, or the one that is given.
    """

    def __init__(self, checkpoint: Checkpoint, given: Path | None = None):
        path = given / TOKENIZER if given is not None and given.is_dir() else given
        path = path or checkpoint.tokenizer
        if path is None:
            raise CheckpointError(
                f"{checkpoint.folder} holds no tokenizer (it was trained on token shards without "
                "one): name the one that made them with --tokenizer tokenizer.json"
            )
        model = checkpoint.settings.model
        self.path = path
        self.tokenizer = Tokenizer.load(path)
        self._context = model.context
        self._folders = [path.parent]
        # Training copies the tokenizer and its chat template; what else came with it, such as ways
        # of sampling, is where `data.tokenizer` found it.
        chosen = checkpoint.settings.data.tokenizer if path == checkpoint.tokenizer else ""
        with contextlib.suppress(ThinwireError):
            if chosen and Tokenizer.load(chosen).digest == self.tokenizer.digest:
                self._folders.append(expanded(chosen, "data.tokenizer").parent)
        if self.tokenizer.vocab_size > model.vocab:
            raise ConfigError(
                f"{path} has {self.tokenizer.vocab_size} entries, but the model was trained with "
                f"{model.vocab}: it is not the tokenizer of this model"
            )

    def write(self, folder: Path) -> None:
        """Copy what is there, and make what is not."""
        shutil.copyfile(self.path, folder / TOKENIZER)
        for name in BESIDE:
            if (found := self._beside(name)) is not None:
                shutil.copyfile(found, folder / name)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._context,
            "clean_up_tokenization_spaces": False,
        }
        if (end := self.tokenizer.end_of_text) is not None:
            config |= dict.fromkeys(("bos_token", "eos_token"), self.tokenizer.decode([end]))
        known = self._beside(TOKENIZER_CONFIG)
        write_json(folder / TOKENIZER_CONFIG, config | (read_json(known) if known else {}))

    def generation(self) -> dict[str, Any]:
        """Where a text begins and ends, in ids, for the configs of the model."""
        known = self._beside(GENERATION)
        if known is not None:
            kept = read_json(known)
            keys = ("bos_token_id", "eos_token_id", "pad_token_id")
            return {key: kept[key] for key in keys if key in kept}
        end = self.tokenizer.end_of_text
        ends = sorted(self._chat_ends() | ({end} if end is not None else set()))
        if not ends:
            return {}
        # Training puts one token between texts: it ends one and begins the next.
        first = {} if end is None else {"bos_token_id": end}
        last = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
        return {**first, **last, "pad_token_id": ends[0] if end is None else end}

    def _chat_ends(self) -> set[int]:
        """Ids that end an answer, where there is a chat template."""
        for folder in self._folders:
            with contextlib.suppress(DataError):  # none, or one that another program may still use
                template = ChatTemplate.chosen("tokenizer", folder / TOKENIZER)
                return set(Chat(self.tokenizer, template).end_ids)
        return set()

    def _beside(self, name: str) -> Path | None:
        folders = self._folders
        if name == JINJA:  # it would come before the template of a nearer tokenizer_config.json
            folders = [folder for folder in folders if _has_template(folder)][:1]
        paths = (folder / name for folder in folders)
        return next((path for path in paths if path.is_file()), None)


def _has_template(folder: Path) -> bool:
    try:
        return ChatTemplate.beside(folder / TOKENIZER) is not None
    except DataError:  # one that another program may still use
        return True


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
    own, context = tokenizer.tokenizer, checkpoint.settings.model.context
    # The run's own validation text if it is on this machine, else a sample.
    corpus = corpus_of(checkpoint)
    text = "a sample text" if corpus is None else "validation text"
    known = own.encode(SAMPLE) if corpus is None else corpus.valid
    ids = torch.tensor([[int(i) for i in known[: min(TOKENS, context)]]])
    opener = tokenizer_class(folder, own)
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
        start = prompt.shape[1]
        # Greedy, whatever ways of sampling the folder recommends.
        ends = theirs.generation_config.eos_token_id
        plain = needs("transformers", "hf", VERIFYING).GenerationConfig
        theirs.generation_config = plain(eos_token_id=ends, pad_token_id=0)
        how = {"do_sample": False, "max_new_tokens": min(CONTINUED, context - start)}
        continued = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
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
    _check_text(continued[0, start:].tolist(), ahead_TV[start - 1 :], limit)
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


def corpus_of(checkpoint: Checkpoint) -> Corpus | None:
    """The prepared corpus that a checkpoint was trained on, if it is still in the cache."""
    fingerprint = checkpoint.manifest["corpus"]
    for manifest in cache_folder().glob("*/manifest.json"):
        with contextlib.suppress(OSError, UnicodeDecodeError, DataError):  # another's, or damaged
            if fingerprint and fingerprint in manifest.read_text(encoding="utf-8"):
                corpus = Corpus.open(manifest.parent)
                if corpus.fingerprint == fingerprint:
                    return corpus
    return None


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
    lora = settings.lora
    place = settings.train.init_from  # of which its name is said, without the path to it
    facts: dict[str, Any] = {
        "model": shape,
        "steps": f"{step:,} of {settings.train.steps:,}",
        "tokens": f"{step * settings.tokens_per_step:,}, {settings.tokens_per_step:,} per step",
        "started from": place and f"`{Path(place).name}`",
        "data": f"source `{data.source}`" + (f", fingerprint `{corpus}`" if corpus else ""),
        **_losses(checkpoint),
        "optimizer": f"{optim.name}, learning rate {optim.lr:g}, weight decay "
        f"{optim.weight_decay:g}, warmup {optim.warmup} steps, clip {optim.clip:g}",
        "adapters": lora.rank
        and f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, beside {', '.join(lora.targets)}; "
        "merged into the weights",
        "precision": settings.run.precision,
        "seed": str(settings.run.seed),
        "cuts": _cuts(settings),
        "codecs": settings.pipeline.stages > 1
        and f"`{settings.codec.forward}` forward, `{settings.codec.backward}` back "
        "(in training only: not part of this model)",
        "settings hash": f"`{settings.hash}`",
        "thinwire": thinwire.__version__,
    }
    return {key: fact for key, fact in facts.items() if fact}


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


def run_tasks(
    place: Path,
    tasks: list[str],
    display: Display,
    device: str = "auto",
    limit: int = 0,
    folder: Path | None = None,
    allow_plugins: bool = False,
) -> dict[str, dict[str, Any]]:
    """Scores by task and metric; `limit` examples of each task, 0 = all.

    `folder` has task files of the user's own. The harness loads the data of its tasks itself.
    """
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
        if not (place / CONFIG).is_file():  # no exported model yet
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
