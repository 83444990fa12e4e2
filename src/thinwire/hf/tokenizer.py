"""The tokenizer of a run as the files that transformers reads."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

from thinwire.data import Corpus, Tokenizer
from thinwire.data.chat import CONFIG, JINJA, Chat, ChatTemplate
from thinwire.engine.checkpoint import TOKENIZER, Checkpoint
from thinwire.errors import CheckpointError, ConfigError, DataError, ThinwireError
from thinwire.hf.folder import read_json, write_json
from thinwire.paths import cache_folder, expanded

GENERATION = "generation_config.json"
BESIDE = (CONFIG, "special_tokens_map.json", JINJA, GENERATION)
"""What may stand beside a tokenizer.json, and goes where it goes."""


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
        # Training copies the tokenizer and its chat template: what else came with it, such as ways
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
        known = self._beside(CONFIG)
        write_json(folder / CONFIG, config | (read_json(known) if known else {}))

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
        closing = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
        if end is None:
            return {**closing, "pad_token_id": ends[0]}
        # Training puts one token between texts: it ends one and begins the next.
        return {"bos_token_id": end, **closing, "pad_token_id": end}

    def _chat_ends(self) -> set[int]:
        """Ids that end an answer, where there is a chat template."""
        for folder in self._folders:
            with contextlib.suppress(DataError):  # one that another program may still use
                template = ChatTemplate.beside(folder / TOKENIZER)
                if template is not None:
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
