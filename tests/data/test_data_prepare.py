import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from refusing import refused

from thinwire.data import DataConfig, Tokenizer
from thinwire.data import corpus as prepared_module
from thinwire.data.chat import CHATML, ChatTemplate
from thinwire.data.tokenizer import RESERVED

VOCAB = 300


class Recorder:
    """A progress callback that keeps what it was told."""

    def __init__(self):
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self, phase, done, total):
        self.calls.append((phase, done, total))

    @property
    def phases(self):
        return list(dict.fromkeys(phase for phase, _, _ in self.calls))


def text_config(path, **changes):
    return DataConfig(source="text", path=str(path), **{"valid_fraction": 0.2, **changes})


def documents_of(corpus, side):
    tokenizer = corpus.tokenizer()
    text = tokenizer.decode(getattr(corpus, side))
    assert text.endswith("<|endoftext|>")
    return text.split("<|endoftext|>")[:-1]


def make_old(folder):
    """Give the files times that are not "just now", as those of a real corpus."""
    for path in folder.rglob("*"):
        os.utime(path, (1_600_000_000, 1_600_000_000))


def test_documents_arrive_whole_on_exactly_one_side(text_folder, made, text_of):
    corpus = made(text_config(text_folder))
    train, valid = documents_of(corpus, "train"), documents_of(corpus, "valid")
    assert train and valid
    assert sorted(train + valid) == sorted(text_of(i) for i in range(40))
    assert corpus.valid_bytes == sum(len(text.encode()) for text in valid)
    assert corpus.valid_sizes.sum() == corpus.valid_bytes
    assert set(corpus.valid_sizes[corpus.valid == corpus.tokenizer().end_of_text]) == {0}
    assert corpus.vocab == VOCAB
    assert corpus.train.dtype == np.uint16


def test_changed_content_of_the_same_size_and_time_is_noticed(text_folder, made, monkeypatch):
    monkeypatch.setattr(prepared_module, "_CLOCK_TICK_NS", -1)
    make_old(text_folder)
    first = made(text_config(text_folder))
    path = text_folder / "07.txt"
    changed = path.read_text().replace("amber", "ember")
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock may not have ticked yet
        path.write_text(changed)
        make_old(text_folder)
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second = made(text_config(text_folder))
    assert second.fingerprint != first.fingerprint
    assert changed in documents_of(second, "train") + documents_of(second, "valid")


def test_whatever_decides_the_ids_makes_another_corpus(text_folder, made, tmp_path):
    Tokenizer.train(["other text"], 260).save(tmp_path / "t.json")
    config = text_config(text_folder)
    corpora = [made(config), made(config, VOCAB - 1), made(replace(config, valid_fraction=0.6)),
               made(replace(config, tokenizer=str(tmp_path / "t.json")))]  # fmt: skip
    (text_folder / "new.txt").write_text("one more document\n")
    corpora.append(made(config))
    assert len({corpus.folder for corpus in corpora}) == 5
    assert len({corpus.fingerprint for corpus in corpora}) == 5


def test_given_tokenizer_is_used_and_kept(text_folder, made, tmp_path, text_of):
    given = Tokenizer.train([text_of(99)], 280)
    given.save(tmp_path / "t.json")
    seen = Recorder()
    config = text_config(text_folder, tokenizer=str(tmp_path / "t.json"))
    corpus = made(config, 5000, seen)
    (tmp_path / "t.json").unlink()
    assert corpus.vocab == 280
    assert corpus.tokenizer().digest == given.digest
    assert seen.phases == ["reading", "tokenising"]
    given.save(tmp_path / "t.json")
    complaint = r"has 280 entries, model\.vocab is 279: set model\.vocab to at least 280"
    refused(complaint, made, config, 279)
    assert made(config, 280).vocab == 280


def test_a_trained_tokenizer_has_tokens_for_chats_and_tools(text_folder, made):
    """Behind all others, so that text keeps its ids; ChatML uses them, and needs no more."""
    tokenizer = made(text_config(text_folder)).tokenizer()
    last = range(tokenizer.vocab_size - len(RESERVED), tokenizer.vocab_size)
    assert [tokenizer.id_of(name) for name in RESERVED] == list(last)
    assert set(last) <= set(tokenizer.special_ids)
    assert set(ChatTemplate(CHATML, "chatml").special_names) == set(RESERVED)
    bytes_alone = made(text_config(text_folder), 257)
    assert bytes_alone.vocab == 257, "there is no room for them"


def test_a_killed_run_leaves_nothing_that_is_taken_for_complete(text_folder, cache, made):
    """The process ends without any cleaning up, in the middle of tokenising."""
    code = (
        "import os, sys; from thinwire.data import DataConfig, prepare\n"
        "def die(phase, done, total):\n"
        "    if phase == 'tokenising' and done > total // 2: os._exit(9)\n"
        "config = DataConfig(source='text', path=sys.argv[1], valid_fraction=0.2)\n"
        "prepare(config, 300, sys.argv[2], die)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, text_folder, cache])
    assert ended.returncode == 9
    left = [path.name for path in cache.iterdir() if path.name != "seen"]
    assert left and all(".partial-" in name for name in left)
    corpus = made(text_config(text_folder))
    assert len(corpus.train) > 0
    (kept,) = (path for path in cache.iterdir() if path.name != "seen")
    assert kept == corpus.folder, "and what it left is removed"


@pytest.mark.parametrize("when", ["reading", "training the tokenizer"])
def test_corpus_that_changes_while_it_is_read(text_folder, cache, made, when):
    """Found out by whichever pass comes next, the tokenizer's or the last one."""

    def meddle(phase, done, total):
        if phase == when and done == total:
            (text_folder / "39.txt").write_text("something else\n")

    refused("changed while", made, text_config(text_folder), VOCAB, meddle)
    assert not [path for path in cache.glob("*") if path.name != "seen"]


@pytest.fixture
def valid_folder(tmp_path, text_of):
    folder = tmp_path / "to validate"
    folder.mkdir()
    (folder / "one.txt").write_text(text_of(1000))
    (folder / "copy.txt").write_text(text_of(7))  # a training document too
    return folder


def test_text_to_validate_on_may_lie_elsewhere(text_folder, valid_folder, made, text_of):
    config = text_config(text_folder, valid_path=str(valid_folder))
    seen = Recorder()
    corpus = made(config, VOCAB, seen)
    assert documents_of(corpus, "valid") == [text_of(7), text_of(1000)]
    assert documents_of(corpus, "train") == [text_of(i) for i in range(40) if i != 7]
    assert corpus.valid_bytes == len(text_of(7)) + len(text_of(1000))
    done = [call[1] for call in seen.calls if call[0] == "reading"]
    assert done == sorted(done) and done[-1] == seen.calls[0][2]
    other = made(replace(config, valid_fraction=0.4))
    assert other.folder == corpus.folder, "the fraction is of no use then"


def test_nothing_to_validate_on(text_folder, tmp_path, made):
    (tmp_path / "blank.txt").write_text(" \n")
    for path, words in (
        (tmp_path / "blank.txt", r"no text to validate on in .*blank\.txt"),
        ("none", r"data\.valid_path = none does not exist"),
        (text_folder, r"all of it is in data\.valid_path as well"),
    ):
        refused(words, made, text_config(text_folder, valid_path=str(path)))


def test_tokenizer_never_sees_validation_text(tmp_path, made, text_of):
    """A word that only a validation document has must not become a token."""
    marked = "zyzzyva" * 2000
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(20):
        (texts / f"{i}.txt").write_text(text_of(i))
        (texts / f"marked {i}.txt").write_text(f"{i} {marked}")
    corpus = made(text_config(texts, valid_fraction=0.5), 400)
    assert any(marked in text for text in documents_of(corpus, "train"))
    valid = [text for text in documents_of(corpus, "valid") if marked in text]
    for path in texts.iterdir():
        if marked in path.read_text() and path.read_text() not in valid:
            path.unlink()
    alone = made(text_config(texts, valid_fraction=0.5), 400)
    assert not any(marked in text for text in documents_of(alone, "train"))
    assert len(alone.tokenizer().encode("zyzzyva")) == len("zyzzyva")


def test_what_a_tokenizer_loses_is_said_each_time(text_folder, made, tmp_path, text_of):
    trained = json.loads(Tokenizer.train([text_of(0)], 257)._backend.to_str())
    del trained["model"]["vocab"]["0"]
    (tmp_path / "t.json").write_text(json.dumps(trained))
    config = text_config(text_folder, tokenizer=str(tmp_path / "t.json"))
    total = sum(len(text_of(i)) for i in range(40))
    zeros = sum(text_of(i).count("0") for i in range(40))
    for _ in range(2):  # made, and found in the cache
        (note,) = made(config).notes
        assert f"loses {zeros:,} of {total:,} characters" in note and "'0'" in note
    assert made(text_config(text_folder)).notes == ()
