"""What of a run's data is on this machine when its checkpoint is exported."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from thinwire.data import Corpus, Tokenizer
from thinwire.engine import Checkpoint
from thinwire.errors import DataError, ThinwireError
from thinwire.paths import cache_folder, expanded


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


def tokenizer_folders(checkpoint: Checkpoint, path: Path) -> Iterator[Path]:
    """Folders with the same tokenizer.json, beside which more may be known of it.

    First its own. Training copies the tokenizer alone, so what came with it, such as a chat
    template, is with the corpus or where `data.tokenizer` found it.
    """
    yield path.parent
    if path != checkpoint.tokenizer:
        return
    corpus = corpus_of(checkpoint)
    if corpus is not None:
        yield corpus.folder
    chosen = checkpoint.settings.data.tokenizer
    with contextlib.suppress(ThinwireError):
        if chosen and Tokenizer.load(chosen).digest == Tokenizer.load(path).digest:
            yield expanded(chosen, "data.tokenizer").parent
