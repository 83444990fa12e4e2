"""From the settings to a prepared corpus: read, train a tokenizer, tokenise, once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from thinwire.data.chat import CHATML, CHATML_TOKENS, ChatTemplate, form_of
from thinwire.data.corpus import Corpus, Progress, TokenChunk, found_or_made, write_corpus
from thinwire.data.documents import Conversations, Document, Group, Texts, ValidationSplit
from thinwire.data.shards import changed, find_shards
from thinwire.data.sources import HubDataset, SourceFile, read_records, stdlib_files, text_files
from thinwire.data.tokenizer import RESERVED, SMALLEST_VOCAB, Tokenizer, check_trainable
from thinwire.errors import ConfigError, DataError
from thinwire.paths import expanded
from thinwire.typed import option

SOURCES = ("stdlib", "text", "tokens", "chat", "hf")
LEARN = ("answers", "all")
# More text hardly changes the merges of a BPE, but its training time grows with it.
TOKENIZER_SAMPLE_BYTES = 128_000_000


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from."""

    source: str = option("stdlib", "what to train on", SOURCES)
    path: str = option(
        "",
        'file or folder to read; "hf": also NAME[:CONFIG] on the hub; not used by "stdlib"',
        scope="machine",
    )
    tokenizer: str = option("", "path of a tokenizer.json; empty = train one on the corpus")
    valid_fraction: float = option(
        0.02, "fraction of text or tokens held out for validation", above=0, below=1
    )
    valid_path: str = option(
        "", "separate validation file or folder; replaces valid_fraction", scope="machine"
    )
    text_key: str = option(
        "text", "key (.jsonl) or column (.parquet) that holds the text", scope="machine"
    )
    split: str = option("train", "hf: the split to train on")
    valid_split: str = option("", "hf: the split to validate on; replaces valid_fraction")
    template: str = option(
        "", "chat: empty = the tokenizer's own, or chatml; tokenizer, chatml, or a Jinja file"
    )
    learn: str = option("answers", "chat: which tokens are learned", LEARN)


def prepare(
    config: DataConfig, vocab: int, cache: str | Path, progress: Progress = lambda *done: None
) -> Corpus:
    """Make the corpus of these settings under `cache`, or find it; the model has `vocab` ids."""
    tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer else None
    if tokenizer is not None:
        _check_room(tokenizer, vocab)
    build = _token_shards if config.source == "tokens" else _documents
    return build(config, vocab, Path(cache), tokenizer, progress)


def _source_of(config: DataConfig) -> tuple[Texts, list[list[SourceFile]], Any, str]:
    """Documents, their files, how these are read, and the name of what is given to validate."""
    key, given = config.text_key, config.valid_path
    how: Any = [config.source, config.learn, key]
    if config.source == "hf":
        if given:
            raise ConfigError('data.source = "hf" reads no data.valid_path: use valid_split')
        given = config.valid_split
        datasets = [HubDataset(config.path, split) for split in (config.split, given) if split]
        first = next(datasets[0].records(), None)
        is_chat = first is not None and form_of(first.values) is not None
        files = [dataset.files for dataset in datasets]
        groups: list[Group] = [(dataset.records, 0) for dataset in datasets]
        identities = [dataset.identity for dataset in datasets]
        how = None if None in identities else [how, identities]
    else:
        is_chat, is_stdlib = config.source == "chat", config.source == "stdlib"
        kind = "chat" if is_chat else "text"
        train = stdlib_files() if is_stdlib else text_files(config.path, source=kind)
        files = [train, text_files(given, "data.valid_path", kind) if given else []]
        groups = []
        for number, group in enumerate(files):
            skip = is_stdlib and number == 0
            records = partial(read_records, group, "" if is_chat else key, skip)
            groups.append((records, sum(file.size for file in group)))
    tokenizer = expanded(config.tokenizer, "data.tokenizer") if config.tokenizer else None
    if is_chat:
        template = ChatTemplate.chosen(config.template, tokenizer)
        return Conversations(groups, template, config.learn == "all"), files, how, given
    own = ChatTemplate.beside(tokenizer) if tokenizer else None
    return Texts(groups, key, own), files, how, given


def _documents(
    config: DataConfig, vocab: int, cache: Path, tokenizer: Tokenizer | None, report: Progress
) -> Corpus:
    of, files, how, given = _source_of(config)
    special: list[str] = []
    if isinstance(of, Conversations) and not of.template.is_own:
        # A tool's tokens are text to a tokenizer that lacks them.
        names = CHATML_TOKENS if of.template.source == CHATML else of.template.special_names
        special = [name for name in names if tokenizer is None or tokenizer.id_of(name) is None]
    if tokenizer is None:
        check_trainable(vocab, special)
        # With the tokens of ChatML, so that the model can learn chat later, where there is room.
        wanted = list(dict.fromkeys([*special, *RESERVED]))
        special = wanted if vocab >= SMALLEST_VOCAB + len(wanted) else special
    elif special:
        tokenizer = tokenizer.with_special(special)
        _check_room(tokenizer, vocab, f", with {', '.join(special)} of the chat template")

    def documents(phase: str) -> Iterator[Document]:
        return of.read(lambda done: report(phase, done, of.size))

    def read() -> tuple[str, Callable[[Path], None]]:
        split = ValidationSplit(documents("reading"), config.valid_fraction, of.whole)
        if given and not split.given:
            raise DataError(f"there is no text to validate on in {given}")
        return split.content, partial(make, split)

    def sample(split: ValidationSplit) -> Iterator[str]:
        """Text for the tokenizer: all of a small corpus, drawn documents of a large one."""
        share, taken = TOKENIZER_SAMPLE_BYTES / split.size, False
        for side, text, drawn in split.passages(documents("training the tokenizer")):
            if side == "train" and (drawn < share or not taken):
                taken = True
                yield from of.texts(text)

    def make(split: ValidationSplit, folder: Path) -> None:
        used = tokenizer or Tokenizer.train(sample(split), vocab, special)
        texts = ((side, text) for side, text, _ in split.passages(documents("tokenising")))
        chunks = of.encode(used, texts)
        told = split.documents, of.template, of.remarks
        write_corpus(folder, config.source, used.vocab_size, chunks, used, *told)

    encoding = tokenizer.digest if tokenizer else " ".join(["train", str(vocab), *special])
    key = _key(config, encoding)
    if of.template is not None:
        key += [of.template.digest, config.learn]
    return found_or_made(cache, files, key, read, how)


def _token_shards(
    config: DataConfig, vocab: int, cache: Path, tokenizer: Tokenizer | None, report: Progress
) -> Corpus:
    shards = find_shards(config.path, config.valid_path)

    def read() -> tuple[str, Callable[[Path], None]]:
        content, largest, where = shards.scan(lambda done: report("reading", done, shards.size))
        _check_ids(largest, str(where), tokenizer, vocab)
        used = tokenizer.vocab_size if tokenizer else largest + 1
        return content, lambda folder: write_corpus(
            folder, config.source, used, copied(content), tokenizer
        )

    def copied(scanned: str) -> Iterator[TokenChunk]:
        content, done = shards.new_hash(), 0
        end_of_text = tokenizer.end_of_text if tokenizer else None
        cut = shards.validation_start(config.valid_fraction, end_of_text)
        for side, start, stop in (("train", 0, cut), ("valid", cut, sum(shards.counts))):
            for ids in shards.read(start, stop):
                yield TokenChunk(side, ids)
                content.update(ids.astype("<u4"))
                done += ids.nbytes
                report("copying", done, shards.size)
        if content.hexdigest() != scanned:
            raise changed(Path(config.path))

    encoding = tokenizer.digest if tokenizer else "no tokenizer"
    corpus = found_or_made(cache, shards.files, _key(config, encoding), read)
    _check_ids(corpus.vocab - 1, config.path, tokenizer, vocab)  # one made for a larger model
    return corpus


def _key(config: DataConfig, encoding: str) -> list[Any]:
    """What else than the content of the source decides which ids the corpus has."""
    is_given = config.valid_path or config.valid_split
    return [config.source, encoding, "valid_path" if is_given else config.valid_fraction]


def _check_room(tokenizer: Tokenizer, vocab: int, added: str = "") -> None:
    if (size := tokenizer.vocab_size) > vocab:
        raise DataError(
            f"the tokenizer has {size} entries{added}, model.vocab is {vocab}: set model.vocab to "
            f"at least {size} (weights of --init-from grow), or use another tokenizer or template"
        )


def _check_ids(largest: int, where: str, tokenizer: Tokenizer | None, vocab: int) -> None:
    if tokenizer is not None and largest >= tokenizer.vocab_size:
        raise DataError(
            f"{where} holds token id {largest}, but the tokenizer given for it has "
            f"{tokenizer.vocab_size} entries: it is not the tokenizer of these shards"
        )
    if largest >= vocab:
        raise DataError(
            f"{where} holds token id {largest}, model.vocab is {vocab}: set at least {largest + 1}"
        )
