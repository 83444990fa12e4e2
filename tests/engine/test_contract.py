"""Two ends that do not match say why, and which command mends it."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

import thinwire
from thinwire.engine.worker import Worker, remedy
from thinwire.errors import WireError
from thinwire.wire import handshake, memory_pair


def refusal(mine, theirs):
    """What the end with the first contract says of the second; nothing if they match."""
    here, there = memory_pair()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(handshake, there, theirs, {}, 30.0)
        try:
            handshake(here, mine, mine, 30.0, remedy=remedy)
        except WireError as error:
            return str(error)
    return ""


@pytest.fixture
def contract(corpus, tmp_path):
    """That of cut 0 in the third epoch."""

    def of(settings):
        worker = Worker(settings, 0, corpus, tmp_path / "run")
        return worker.contract(0, epoch=3)

    return of


def test_a_difference_names_its_cause_and_what_mends_it(contract, make_settings):
    mine = contract(make_settings())
    assert mine["thinwire"] == thinwire.__version__ and refusal(mine, dict(mine)) == ""
    for key, value, words in [
        ("epoch", 2, r"3, the other end has 2 \(.*`thinwire join` command again"),
        ("corpus", "ab", r"\(the prepared data differ: .*--resume\)"),
        ("first_step", 4, r"same checkpoint: --resume on the host"),
        ("forward_codec_memory", "ab", "same checkpoint"),
        ("backward_codec", "int8", r"has int8 \(.*same codec settings"),
    ]:
        text = refusal(mine, {**mine, key: value})
        assert re.search(rf"match: {key}: this stage has .*{words}", text), text


def test_other_settings_are_named_by_their_sections(contract, make_settings):
    theirs = contract(make_settings(optim__lr=0.5, train__batch=4))
    text = refusal(contract(make_settings()), theirs)
    assert "(they differ in optim, train)" in text
    assert re.search(r"config_hash: .* start both from the same run.toml", text)


@pytest.mark.parametrize("theirs", [None, [], {"model": {}}, "x" * 50_000, {"a": 1e9}, 7])
def test_whatever_the_other_end_says_is_a_difference_and_no_failure(
    theirs, contract, make_settings
):
    mine = contract(make_settings())
    for key in mine:
        text = refusal(mine, {**mine, key: theirs})
        assert f"match: {key}: this stage has" in text and len(text) < 2000
