"""Token shards become a corpus: cut, checked and copied without trust."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_data_prepare import Recorder

from thinwire.data import DataConfig, Tokenizer, prepare
from thinwire.data import corpus as prepared_module
from thinwire.errors import DataError


def write_shard(path: Path, ids, dtype="<u2") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array(ids, dtype=dtype).tofile(path)


def test_token_shards_with_and_without_validation(tmp_path, cache):
    write_shard(tmp_path / "both" / "train.bin", [1, 2, 3])
    write_shard(tmp_path / "both" / "val.bin", [4])
    write_shard(tmp_path / "one.bin", range(100))
    config = DataConfig(source="tokens", path=str(tmp_path / "both"), valid_fraction=0.1)
    seen = Recorder()
    corpus = prepare(config, 50, cache, seen)
    assert (corpus.train.tolist(), corpus.valid.tolist()) == ([1, 2, 3], [4])
    assert (corpus.vocab, corpus.valid_bytes, corpus.tokenizer()) == (5, 0, None)
    assert seen.calls[-1] == ("copying", 8, 8)
    corpus = prepare(replace(config, path=str(tmp_path / "one.bin")), 100, cache)
    assert corpus.train.tolist() == list(range(90))
    assert corpus.valid.tolist() == list(range(90, 100))


def test_token_shards_to_validate_on_may_lie_elsewhere(tmp_path, cache):
    write_shard(tmp_path / "both" / "train.bin", [1, 2, 3])
    write_shard(tmp_path / "both" / "val.bin", [4])
    write_shard(tmp_path / "other.bin", [5, 6])
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
    write_shard(shard, range(300))
    ids = {
        "larger ids": [60_000] * 300,
        "other ids": range(300, 0, -1),
        "shorter": range(5),
        "longer": [7, *range(300)],
    }

    def meddle(phase: str, done: int, total: int) -> None:
        if phase == "reading":
            write_shard(shard, ids[change])

    config = DataConfig(source="tokens", path=str(shard), valid_fraction=0.1)
    with pytest.raises(DataError, match="changed while it was being read"):
        prepare(config, 301, cache, meddle)
    assert not [path for path in cache.iterdir() if path.name != "seen"]


def test_token_shards_are_cut_at_the_tokenizers_end_of_text(tmp_path, cache):
    Tokenizer.train(["text"], 257).save(tmp_path / "t.json")
    ids = np.ones(100, dtype=np.uint16)
    ids[87] = 0  # the id of <|endoftext|>
    write_shard(tmp_path / "one.bin", ids)
    config = DataConfig(
        source="tokens",
        path=str(tmp_path / "one.bin"),
        tokenizer=str(tmp_path / "t.json"),
        valid_fraction=0.1,
    )
    corpus = prepare(config, 257, cache)
    assert (len(corpus.train), len(corpus.valid)) == (88, 12)
    assert corpus.tokenizer().end_of_text == 0


def test_shard_ids_beyond_the_vocabulary(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(prepared_module, "_CLOCK_TICK_NS", -1)
    write_shard(tmp_path / "s" / "a_train_1.bin", [1, 2, 3])
    write_shard(tmp_path / "s" / "a_train_2.bin", [1, 4095, 4096])
    config = DataConfig(source="tokens", path=str(tmp_path / "s"))
    complaint = r"token id 4096, model\.vocab is 4096: set model\.vocab to at least 4097"
    with pytest.raises(DataError, match=rf"a_train_2\.bin holds {complaint}"):
        prepare(config, 4096, cache)
    assert prepare(config, 4097, cache).vocab == 4097
    with pytest.raises(DataError, match=complaint):  # now that a larger model has prepared it
        prepare(config, 4096, cache)


def test_shards_of_another_tokenizer(tmp_path, cache):
    Tokenizer.train(["text"], 257).save(tmp_path / "t.json")
    write_shard(tmp_path / "one.bin", [1, 300, 2])
    config = DataConfig("tokens", str(tmp_path / "one.bin"), str(tmp_path / "t.json"))
    with pytest.raises(DataError, match=r"token id 300, but the tokenizer .* has 257 entries"):
        prepare(config, 5000, cache)
