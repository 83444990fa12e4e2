"""Token shards become a corpus: cut, checked and copied without trust."""

from dataclasses import replace

import numpy as np
import pytest
from refusing import refused
from test_data_prepare import Recorder

from thinwire.data import DataConfig, Tokenizer, prepare
from thinwire.data import corpus as prepared_module
from thinwire.data import shards as module
from thinwire.data.shards import find_shards
from thinwire.errors import DataError


def write_raw(path, ids):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array(ids, dtype="<u2").tofile(path)
    return path


def write_with_header(path, ids, magic=20240520, version=1, count=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    dtype = "<u2" if magic == 20240520 else "<u4"
    path.write_bytes(header.tobytes() + np.array(ids, dtype=dtype).tobytes())
    return path


def sides(path):
    """The ids to train on, and to validate on."""
    found = find_shards(str(path))
    total = sum(found.counts)
    ids = np.concatenate([np.empty(0, "<u4"), *found.read(0, total)]).tolist()
    return [ids[: found.counts[0]], ids[found.counts[0] :]]


def test_layouts_with_and_without_a_header(tmp_path, monkeypatch):
    """Shards join in the order of their names, and are read a few ids at a time."""
    raw, headed = tmp_path / "raw", tmp_path / "headed"
    write_raw(raw / "train.bin", [1, 2, 65535])
    write_raw(raw / "val.bin", [4, 5])
    (raw / "meta.pkl").write_bytes(b"left alone")
    assert sides(raw) == [[1, 2, 65535], [4, 5]]
    headed.mkdir()
    write_with_header(headed / "web_train_000002.bin", range(10, 20))
    write_with_header(headed / "web_train_000001.bin", range(10))
    write_with_header(headed / "web_val_000000.bin", [9])
    found = find_shards(str(headed))
    assert sides(headed) == [list(range(20)), [9]] and found.size == 42
    monkeypatch.setattr(module, "_CHUNK", 4)
    parts = list(found.read(7, 15))
    assert max(map(len, parts)) <= 4
    assert np.concatenate(parts).tolist() == list(range(7, 15))
    path = write_with_header(tmp_path / "a.bin", [128000, 70000], magic=20240801, version=7)
    assert sides(path) == [[128000, 70000], []]


def test_the_cut_moves_to_the_nearest_end_of_text(tmp_path):
    def cut(ids, fraction=0.1, end_of_text=7):
        shards = find_shards(str(write_raw(tmp_path / "a.bin", ids)))
        return shards.validation_start(fraction, end_of_text)

    ids = np.ones(1000, dtype=np.uint16)
    assert cut(ids) == 900
    ids[[100, 880, 925, 990]] = 7
    assert cut(ids) == 881
    ids[890] = 50256
    assert cut(ids, end_of_text=None) == 891, "the layout's own"
    assert cut([1, 1], 0.001) == 1
    refused("1 tokens cannot be split", cut, [1], 0.5)


@pytest.mark.parametrize(("arguments", "complaint"), [
    ({"version": 2}, "magic 20240520 and version 2: .*20240520, 1"),
    ({"magic": 20240522}, "magic 20240522 and version 1"),
    ({"count": 600}, "has 2024 bytes, but its header announces 600 tokens, which take 2224"),
    ({"count": -1}, "announces -1 tokens"),
])  # fmt: skip
def test_bad_header_is_refused_with_its_values(tmp_path, arguments, complaint):
    ids = np.ones(500, dtype=np.uint16)
    path = write_with_header(tmp_path / "bad.bin", ids, **arguments)
    refused(rf"bad\.bin.*{complaint}", find_shards, str(path))


def test_truncated_missing_and_empty_sources(tmp_path):
    path = write_with_header(tmp_path / "bad.bin", [1, 2, 3])
    path.write_bytes(path.read_bytes()[:500])
    refused(r"bad\.bin has 500 bytes, .* truncated", find_shards, str(path))
    path.write_bytes(b"abc")
    refused(r"bad\.bin .* odd size of 3 bytes", find_shards, str(path))
    path.unlink()
    refused("does not exist", find_shards, str(path))
    refused(r"no \.bin token shards", find_shards, str(tmp_path))
    write_raw(tmp_path / "val.bin", [1])
    refused(r"no training shards .* only val\.bin", find_shards, str(tmp_path))
    write_raw(tmp_path / "train.bin", [])
    (tmp_path / "val.bin").unlink()
    refused("the corpus is empty", find_shards(str(tmp_path)).scan, lambda done: None)


def test_token_shards_with_and_without_validation_or_with_that_of_another_place(tmp_path, cache):
    write_raw(tmp_path / "both" / "train.bin", [1, 2, 3])
    write_raw(tmp_path / "both" / "val.bin", [4])
    write_raw(tmp_path / "one.bin", range(100))
    config = DataConfig(source="tokens", path=str(tmp_path / "both"), valid_fraction=0.1)
    seen = Recorder()
    corpus = prepare(config, 50, cache, seen)
    assert (corpus.train.tolist(), corpus.valid.tolist()) == ([1, 2, 3], [4])
    assert (corpus.vocab, corpus.valid_bytes, corpus.tokenizer()) == (5, 0, None)
    assert seen.calls[-1] == ("copying", 8, 8)
    corpus = prepare(replace(config, path=str(tmp_path / "one.bin")), 100, cache)
    assert corpus.train.tolist() == list(range(90))
    assert corpus.valid.tolist() == list(range(90, 100))
    write_raw(tmp_path / "other.bin", [5, 6])
    both, other = str(tmp_path / "both"), str(tmp_path / "other.bin")
    for path, valid_path, train, valid in [
        (both, other, [1, 2, 3], [5, 6]),
        (other, both, [5, 6], [4]),
    ]:
        config = DataConfig(source="tokens", path=path, valid_path=valid_path)
        corpus = prepare(config, 50, cache)
        assert (corpus.train.tolist(), corpus.valid.tolist()) == (train, valid)
    with pytest.raises(DataError, match=r"is in data\.path and in data\.valid_path"):
        prepare(DataConfig(source="tokens", path=other, valid_path=other), 50, cache)


@pytest.mark.parametrize("change", ["larger ids", "other ids", "shorter", "longer"])
def test_token_shards_that_change_between_scan_and_copy(tmp_path, cache, change):
    shard = tmp_path / "one.bin"
    write_raw(shard, range(300))
    ids = {"larger ids": [60_000] * 300, "other ids": range(300, 0, -1), "shorter": range(5),
           "longer": [7, *range(300)]}  # fmt: skip

    def meddle(phase, done, total):
        if phase == "reading":
            write_raw(shard, ids[change])

    config = DataConfig(source="tokens", path=str(shard), valid_fraction=0.1)
    refused("changed while it was being read", prepare, config, 301, cache, meddle)
    assert not [path for path in cache.iterdir() if path.name != "seen"]


def test_shard_ids_beyond_the_vocabulary(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(prepared_module, "_CLOCK_TICK_NS", -1)
    write_raw(tmp_path / "s" / "a_train_1.bin", [1, 2, 3])
    write_raw(tmp_path / "s" / "a_train_2.bin", [1, 4095, 4096])
    config = DataConfig(source="tokens", path=str(tmp_path / "s"))
    complaint = r"token id 4096, model\.vocab is 4096: set at least 4097"
    refused(rf"a_train_2\.bin holds {complaint}", prepare, config, 4096, cache)
    assert prepare(config, 4097, cache).vocab == 4097
    with pytest.raises(DataError, match=complaint):  # now that a larger model has prepared it
        prepare(config, 4096, cache)
    Tokenizer.train(["text"], 257).save(tmp_path / "t.json")
    other = replace(config, tokenizer=str(tmp_path / "t.json"))
    refused(r"token id 4096, but the tokenizer .* has 257 entries", prepare, other, 5000, cache)
