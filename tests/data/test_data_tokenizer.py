import os
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused
from tokenizers import models, pre_tokenizers

from thinwire.data import Tokenizer


@pytest.fixture(scope="module")
def trained():
    words = "the cat sat on the mat and the dog sat on the log\n"
    return Tokenizer.train([words * 20, "def cat(mat):\n    return mat\n" * 20], 280)


def word_tokenizer(*names):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(names))
    return backend


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_every_text_round_trips(trained, text):
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert all(0 <= i < trained.vocab_size for i in ids)


def test_training_in_another_process_gives_the_same(tmp_path):
    """Hash tables are seeded anew in each process, so order that leaks from one would show."""
    code = (
        "import sys; from thinwire.data import Tokenizer;"
        "texts = [f'{a}{b} {b}{a} ' * 3 for a in 'pqrstuvw' for b in 'abcdefgh'];"
        "Tokenizer.train(texts, 400).save(sys.argv[1])"
    )
    for name, threads in (("one.json", "true"), ("two.json", "false")):
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": threads}
        subprocess.run([sys.executable, "-c", code, tmp_path / name], check=True, env=environment)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_spelled_out_special_token_is_plain_text(trained):
    ids = trained.encode("a<|endoftext|>b")
    assert trained.end_of_text not in ids
    assert trained.decode(ids) == "a<|endoftext|>b"
    assert trained.decode([trained.end_of_text]) == "<|endoftext|>"


def test_measured_ids_are_the_same_and_their_bytes_add_up(trained):
    texts = ["the cat\n", "", "é 猫🐈 the mat", "x" * 500]
    measured = trained.encode_measured(texts)
    for text, ids, (same, sizes, _) in zip(texts, trained.encode_all(texts), measured, strict=True):
        assert same.tolist() == ids.tolist()
        assert len(sizes) == len(ids)
        assert sizes.sum() == len(text.encode())
    ids, sizes, _ = measured[0]
    assert [len(trained.decode([i])) for i in ids] == sizes.tolist()


def test_white_space_that_a_tokenizer_skips_is_counted_too():
    ((ids, sizes, _),) = Tokenizer(word_tokenizer("<pad>")).encode_measured(["  a\n b  "])
    assert (ids.tolist(), sizes.tolist()) == ([0, 1], [3, 5])


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"])
def test_the_end_of_text_goes_by_several_names(name):
    assert Tokenizer(word_tokenizer("<pad>", name)).end_of_text == 3
    holes = tokenizers.Tokenizer(models.WordLevel({"a": 0, name: 90}, unk_token="a"))
    assert Tokenizer(holes).vocab_size == 91, "the largest id counts"


def test_truncation_and_padding_of_a_file_are_ignored(tmp_path):
    backend = word_tokenizer("<pad>")
    backend.enable_truncation(2)
    backend.enable_padding(length=5)
    backend.save(str(tmp_path / "t.json"))
    assert Tokenizer.load(tmp_path / "t.json").encode("a b a b a") == [0, 1, 0, 1, 0]
    assert Tokenizer.load(tmp_path / "t.json").encode("b") == [1]


@pytest.mark.parametrize("content", [b"{}", b"not json", b"\xff\xfe"])
def test_invalid_file_names_the_path(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    refused(r"bad\.json", Tokenizer.load, path)
    refused(r"none\.json.*data\.tokenizer", Tokenizer.load, tmp_path / "none.json")
    tokenizers.Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    refused("empty vocabulary", Tokenizer.load, tmp_path / "empty.json")


def test_the_end_of_texts_may_have_a_name_that_stands_beside_the_tokenizer(tmp_path):
    Tokenizer.train(["a"], 257).save(tmp_path / "t.json")
    (tmp_path / "t.json").write_text((tmp_path / "t.json").read_text().replace("endoftext", "stop"))
    assert Tokenizer.load(tmp_path / "t.json").end_of_text is None
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|stop|>"}}')
    assert Tokenizer.load(tmp_path / "t.json").end_of_text is not None


def test_vocabulary_without_room_for_bytes():
    refused(r"model\.vocab = 256 .* at least 257", Tokenizer.train, ["a"], 256)
    smallest = Tokenizer.train(["aaaa"], 257)
    assert smallest.vocab_size == 257
    assert smallest.decode(np.array(smallest.encode("aé"))) == "aé"


@pytest.mark.parametrize(
    "send",
    ["os.kill(os.getpid(), signal.SIGINT)", "signal.pthread_kill(me, signal.SIGINT)"],
    ids=["to the process", "to the thread that computes"],
)
def test_what_never_ends_can_be_left(send):
    code = (
        "import os, signal, threading; from thinwire.data.tokenizer import interruptible\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def work(items):\n"
        f"    me = threading.get_ident(); {send}; threading.Event().wait()\n"
        "try: interruptible(work)\n"
        "except KeyboardInterrupt: print('left')\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (told.stdout, told.returncode) == ("left\n", 0)
