import json

import numpy as np
import pytest
from refusing import refused

from thinwire.data import Corpus, Tokenizer
from thinwire.data.corpus import TokenChunk, write_corpus
from thinwire.errors import DataError


def write(folder, train, valid, vocab=1000, tokenizer=None, source="tokens"):
    sizes = np.full(len(valid), 6) if source == "text" else None
    chunks = [TokenChunk("train", np.array(train)), TokenChunk("valid", np.array(valid), sizes)]
    write_corpus(folder, source, vocab, chunks, tokenizer, documents=3)
    return Corpus.open(folder)


@pytest.fixture
def folder(cache):
    folder = cache / "key"
    tokenizer = Tokenizer.train(["some text"], 260)
    write(folder, range(100), [5, 6], tokenizer=tokenizer, source="text")
    return folder


def test_what_was_written_is_read(folder):
    corpus = Corpus.open(folder)
    assert corpus.train.tolist() == list(range(100))
    assert corpus.valid.tolist() == [5, 6]
    assert isinstance(corpus.train, np.memmap)
    assert (corpus.vocab, corpus.valid_bytes, corpus.folder) == (1000, 12, folder)
    assert corpus.valid_sizes.tolist() == [6, 6]
    assert corpus.tokenizer().decode(corpus.tokenizer().encode("é")) == "é"


@pytest.mark.parametrize(("vocab", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_ids_take_two_bytes_where_they_fit(cache, vocab, dtype):
    corpus = write(cache / "key", [vocab - 1, 0], [1], vocab=vocab)
    assert corpus.train.dtype == dtype
    assert corpus.train.tolist() == [vocab - 1, 0]


def test_fingerprint_tells_ids_apart_and_nothing_else(cache):
    one = write(cache / "a", [1, 2], [3])
    same = write(cache / "b", [1, 2], [3], source="stdlib")
    moved = write(cache / "c", [1], [2, 3])
    other = write(cache / "d", [1, 2], [4])
    larger = write(cache / "e", [1, 2], [3], vocab=2000)
    assert one.fingerprint == same.fingerprint
    found = {corpus.fingerprint for corpus in (one, moved, other, larger)}
    assert len(found) == 4


@pytest.mark.parametrize("name", ["train.bin", "valid.bin", "valid.sizes", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["truncated", "longer", "altered", "missing"])
def test_damaged_file_is_refused(folder, name, damage):
    path = folder / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        changed = bytes([content[0] ^ 1]) + content[1:]
        damaged = {"truncated": content[:-2], "longer": content + b"12", "altered": changed}
        path.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=r"damaged: .*delete the folder") as caught:
        Corpus.open(folder)
    assert name in str(caught.value) and str(folder) in str(caught.value)
    if damage in ("truncated", "longer"):
        assert f"has {path.stat().st_size} bytes instead of {len(content)}" in str(caught.value)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": 2}', '{"format": 99}', '{"format": 2, "files": 3}']
)
def test_unusable_manifest_is_refused(folder, content):
    (folder / "manifest.json").write_text(content)
    refused("delete the folder", Corpus.open, folder)
    (folder / "manifest.json").unlink()
    refused("damaged", Corpus.open, folder)
    refused("no prepared data at", Corpus.open, folder / "none")


def test_failure_half_way_leaves_nothing(cache):
    def chunks():
        yield TokenChunk("train", np.array([1]))
        raise KeyError("a failure of any kind")

    with pytest.raises(KeyError):
        write_corpus(cache / "key", "text", 10, chunks(), None)
    refused("no tokens for valid", write, cache / "key", [1, 2], [])
    assert list(cache.iterdir()) == []


def test_two_runs_at_once_agree_on_one_folder(cache):
    def chunks():
        write(cache / "key", [1, 2], [3])
        yield TokenChunk("train", np.array([1, 2]))
        yield TokenChunk("valid", np.array([3]))

    write_corpus(cache / "key", "text", 10, chunks(), None)
    assert [path.name for path in cache.iterdir()] == ["key"]
    assert Corpus.open(cache / "key").documents == 3  # the first one stays


@pytest.mark.parametrize("change", [{"vocab": 5}, {"dtype": "uint32"}, {"valid_bytes": 1}])
def test_edited_manifest_is_refused(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | change))
    refused("fingerprint", Corpus.open, folder)
