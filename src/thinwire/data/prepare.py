"""From the settings to a prepared corpus: read, train a tokenizer, tokenise, once."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.data.corpus import Chunk, Corpus, write_corpus
from thinwire.data.encode import Losses, encode_passages
from thinwire.data.files import stdlib_files, text_files
from thinwire.data.prepared import Progress, found_or_made
from thinwire.data.shards import ShardScan, changed, find_shards, scan_shards
from thinwire.data.sources import read_documents
from thinwire.data.split import Passage, Scan, Split, scan_documents
from thinwire.data.tokenizer import Tokenizer, check_trainable
from thinwire.errors import ConfigError, DataError
from thinwire.typed import option

TEXT_SOURCES = ("stdlib", "text", "tokens")
SOURCES = (*TEXT_SOURCES, "images")
# More text hardly changes the merges of a BPE, but its training time grows with it.
TOKENIZER_SAMPLE_BYTES = 128_000_000


@dataclass(frozen=True)
class DataConfig:
    """Where tokens or images come from."""

    source: str = option("stdlib", "what to train on", SOURCES)
    path: str = option("", 'file or folder to read; not used by "stdlib"', scope="machine")
    tokenizer: str = option("", "path of a tokenizer.json; empty = train one on the corpus")
    valid_fraction: float = option(
        0.02,
        "fraction of text or tokens held out for validation; images have a test set",
        above=0,
        below=1,
    )
    valid_path: str = option(
        "", "separate validation file or folder; replaces valid_fraction", scope="machine"
    )
    text_key: str = option(
        "text", "key (.jsonl) or column (.parquet) that holds the text", scope="machine"
    )
    augment: bool = option(
        True, "images: random shifts of up to 4 pixels and horizontal flips in training"
    )


def prepare(
    config: DataConfig, vocab: int, cache: str | Path, progress: Progress | None = None
) -> Corpus:
    """Make the corpus of these settings under `cache`, or find it there, and open it.

    `vocab` is the number of ids that the model has. `progress(phase, done, total)` gets
    the bytes read so far. Only the coordinator calls this.
    """
    if config.source not in TEXT_SOURCES:
        known = ", ".join(TEXT_SOURCES)
        raise ConfigError(f"data.source = {config.source!r} is not one of {known}")
    if not 0 < config.valid_fraction < 1:
        raise ConfigError(f"data.valid_fraction = {config.valid_fraction} must lie between 0 and 1")
    tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer else None
    if tokenizer is not None and tokenizer.vocab_size > vocab:
        raise DataError(
            f"the tokenizer {config.tokenizer} has {tokenizer.vocab_size} entries, model.vocab "
            f"is {vocab}: set model.vocab to at least {tokenizer.vocab_size} or choose a "
            "smaller tokenizer"
        )
    report = progress or (lambda phase, done, total: None)
    build = _token_shards if config.source == "tokens" else _text
    return build(config, vocab, Path(cache), tokenizer, report)


def _text(
    config: DataConfig, vocab: int, cache: Path, tokenizer: Tokenizer | None, report: Progress
) -> Corpus:
    if tokenizer is None:
        check_trainable(vocab)  # before the corpus is read, which may take long
    from_stdlib = config.source == "stdlib"
    files = stdlib_files() if from_stdlib else text_files(config.path)
    given = text_files(config.valid_path, "data.valid_path") if config.valid_path else []
    total = sum(file.size for file in (*files, *given))

    def documents(phase: str) -> Iterator[tuple[str, bool]]:
        """All documents, and whether each was given for validation; reported in about 200 steps."""
        before = due = 0
        for group, skip_undecodable in ((files, from_stdlib), (given, False)):
            for text, consumed in read_documents(group, config.text_key, skip_undecodable):
                yield text, group is given
                if before + consumed >= due:
                    report(phase, before + consumed, total)
                    due = before + consumed + max(1, total // 200)
            before += sum(file.size for file in group)
        report(phase, total, total)

    def read() -> tuple[str, Callable[[Path], None]]:
        scan = scan_documents(documents("reading"))
        if given and not scan.given:
            raise DataError(f"there is no text to validate on in {config.valid_path}")
        return scan.content, functools.partial(make, scan)

    def make(scan: Scan, folder: Path) -> None:
        split, used = Split(scan, config.valid_fraction), tokenizer
        if used is None:
            share = TOKENIZER_SAMPLE_BYTES / scan.size
            passages = split.passages(documents("training the tokenizer"))
            used = Tokenizer.train(_tokenizer_sample(passages, share), vocab)
        texts = ((p.side, p.text) for p in split.passages(documents("tokenising")))
        losses = Losses()
        chunks = encode_passages(used, texts, losses)
        write_corpus(
            folder, config.source, used.vocab_size, chunks, used, scan.documents, losses.summary
        )

    encoding = tokenizer.digest if tokenizer else f"train {vocab}"
    key = _key(config, encoding)
    return found_or_made(cache, [files, given], key, read, Corpus.open, config.text_key)


def _token_shards(
    config: DataConfig, vocab: int, cache: Path, tokenizer: Tokenizer | None, report: Progress
) -> Corpus:
    shards = find_shards(config.path, config.valid_path)

    def read() -> tuple[str, Callable[[Path], None]]:
        scan = scan_shards(shards, lambda done: report("reading", done, shards.size))
        _check_ids(scan.largest, str(scan.largest_in), tokenizer, vocab)
        return scan.content, functools.partial(make, scan)

    def copied(scan: ShardScan) -> Iterator[Chunk]:
        content, done = shards.new_hash(), 0
        end_of_text = tokenizer.end_of_text if tokenizer else None
        for side, ids in shards.sides(config.valid_fraction, end_of_text):
            yield Chunk(side, ids)
            content.update(ids.astype("<u4"))
            done += ids.nbytes
            report("copying", done, shards.size)
        if content.hexdigest() != scan.content:
            raise changed(Path(config.path))

    def make(scan: ShardScan, folder: Path) -> None:
        used = tokenizer.vocab_size if tokenizer else scan.largest + 1
        write_corpus(folder, config.source, used, copied(scan), tokenizer)

    encoding = tokenizer.digest if tokenizer else "no tokenizer"
    files = [[shard.file for shard in side] for side in (shards.train, shards.valid)]
    corpus = found_or_made(cache, files, _key(config, encoding), read, Corpus.open)
    _check_ids(corpus.vocab - 1, config.path, tokenizer, vocab)  # one made for a larger model
    return corpus


def _key(config: DataConfig, encoding: str) -> list[Any]:
    """What else than the content of the source decides which ids the corpus has."""
    split = "valid_path" if config.valid_path else config.valid_fraction
    return [config.source, encoding, split]


def _tokenizer_sample(passages: Iterable[Passage], share: float) -> Iterator[str]:
    """Training text for the tokenizer: all of a small corpus, drawn documents of a large one."""
    taken = False
    for side, text, sample in passages:
        if side == "train" and (sample < share or not taken):
            taken = True
            yield text


def _check_ids(largest: int, where: str, tokenizer: Tokenizer | None, vocab: int) -> None:
    if tokenizer is not None and largest >= tokenizer.vocab_size:
        raise DataError(
            f"{where} holds token id {largest}, but the tokenizer given for it has "
            f"{tokenizer.vocab_size} entries: it is not the tokenizer of these shards"
        )
    if largest >= vocab:
        raise DataError(
            f"{where} holds token id {largest}, model.vocab is {vocab}: "
            f"set model.vocab to at least {largest + 1}"
        )
