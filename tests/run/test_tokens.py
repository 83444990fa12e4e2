"""A stage without the corpus gets the ids that it reads, and trains to the same bits."""

import threading

import pytest
import torch

from settings_values import narrow
from thinwire.background import on_daemon_thread
from thinwire.data import Corpus
from thinwire.engine.feed import Feed
from thinwire.errors import WireError
from thinwire.run.tokens import Columns, FetchedCorpus, TokenServer, columns_read
from thinwire.wire import Frame, FrameKind, Link, Meter, encode, handshake, memory_pair
from waiting import PATIENCE
from whole_state import fingerprint

CPU = torch.device("cpu")
NARROW, TABLES = (narrow("projected", anchor=anchor) for anchor in ("none", "per-stage"))
FIXED, SHARED = (narrow("subspace", anchor=anchor) for anchor in ("fixed", "embedding"))
ENDS = [Columns.INPUTS, Columns(0), Columns.TARGETS]
ALL = [Columns.INPUTS, Columns.INPUTS, Columns.INPUTS | Columns.TARGETS]


def joined(corpus, settings, stage):
    """A corpus and a stage that has none, joined in memory."""
    here, there = memory_pair()
    serving = on_daemon_thread("server", lambda: TokenServer(here, corpus, settings))
    far = FetchedCorpus(there, settings, stage)
    return serving.result(), far


def greeted(settings, stage=0, **change):
    """The other end of a stage without the corpus, as a host that says anything of its own."""
    facts = {"config_hash": settings.hash, "corpus": "c", "examples": 100, "validations": 2,
             "text_tokens": 0, "text_bytes": 0, "id_bytes": 2, "masked": False,
             **change}  # fmt: skip
    here, there = memory_pair()
    greeting = on_daemon_thread("host", lambda: handshake(here, facts, {}, PATIENCE))
    far = FetchedCorpus(there, settings, stage)
    greeting.result()
    return here, far


@pytest.mark.parametrize("width", [2, 4])
def test_ids_are_those_that_the_corpus_gives(width, make_settings, corpus):
    """Ids of a large vocabulary are wider."""
    settings = make_settings(pipeline__stages=1)
    corpus = Corpus(**{**vars(corpus), "train": corpus.train.astype(f"<u{width}")})
    server, far = joined(corpus, settings, 0)
    near, fetched = Feed(corpus, settings, CPU), Feed(far, settings, CPU)
    assert far.fingerprint == corpus.fingerprint
    assert fetched.example_count == near.example_count
    assert fetched.validation_text == near.validation_text
    assert fetched.validation_count == near.validation_count > 0
    steps, microbatches = range(settings.train.steps), range(settings.pipeline.microbatches)
    places = [(step, number) for step in steps for number in microbatches]
    read = [[feed.training(*place) for place in places] for feed in (fetched, near)]
    numbers = [*range(near.validation_count)]
    scored = [[feed.validation(number) for number in numbers * 2] for feed in (fetched, near)]
    for ours, theirs in [*zip(*read, strict=True), *zip(*scored, strict=True)]:
        assert torch.equal(ours.inputs, theirs.inputs) and ours.inputs.dtype == torch.int64
        assert torch.equal(ours.targets, theirs.targets)
    assert all(fetched.examples(*place) == near.examples(*place) for place in places)
    far.link.close()
    batches, moved = len(places) + len(numbers), server.meter.snapshot()
    assert moved["received"]["TOKENS"] == {
        "frames": batches, "header_bytes": 64 * batches, "payload_bytes": 0,
    }  # fmt: skip
    ids = batches * settings.microbatch_size * (settings.model.context + 1)
    assert moved["sent"]["TOKENS"]["payload_bytes"] == width * ids
    server.link.close()


@pytest.mark.parametrize(("changes", "reads"), [
    ({}, ENDS), (NARROW, ENDS), (TABLES, ALL), (FIXED, ALL), (SHARED, ALL),
], ids=["dense", "narrow", "tables", "fixed", "shared"])  # fmt: skip
@pytest.mark.parametrize(("learned", "precision"), [("corpus", "fp32"), ("masked", "fp64")])
def test_a_run_without_the_corpus_trains_to_the_same_bits(
    changes, reads, learned, precision, make_settings, run_in_threads, request, tmp_path
):
    settings = make_settings(pipeline__stages=3, run__precision=precision, **changes)
    assert [columns_read(settings, stage) for stage in range(3)] == reads
    data = request.getfixturevalue(learned)
    near = run_in_threads(settings, data=data)
    pairs = [joined(data, settings, stage) for stage in range(3)]
    needs = [columns != Columns(0) for columns in reads]
    assert [far.is_due((0, 0)) for _, far in pairs] == needs
    nowhere = tmp_path / "nothing"
    far = run_in_threads(settings, data=nowhere, far=lambda stage: pairs[stage][1])
    assert far.losses() == near.losses()
    assert far.valid_losses() == near.valid_losses()
    for ours, theirs in zip(far.workers, near.workers, strict=True):
        assert fingerprint(ours.state) == fingerprint(theirs.state)
        assert ours.contract(min(ours.index, 1)) == theirs.contract(min(ours.index, 1))
    last = Feed(pairs[2][1], settings, CPU)
    assert last.validation_text == Feed(data, settings, CPU).validation_text
    sent = pairs[2][0].meter.snapshot()["sent"]["TOKENS"]
    size, context = settings.microbatch_size, settings.model.context
    ids, masks = 2 * size * (context + (reads is ALL)), size * context // 8 + 4
    assert sent["payload_bytes"] == sent["frames"] * (ids + masks * (learned == "masked"))
    for (server, _), reads_any in zip(pairs, needs, strict=True):
        asked = server.meter.snapshot()["received"].get("TOKENS", {"frames": 0})["frames"]
        assert (asked > 0) == reads_any, "a stage that reads nothing asks for nothing"
        server.link.close()
    if not changes:  # a wait for ids is no compute time, and a watchdog must not blame the stage
        spans = [far.steps(stage)[0].spans for stage in range(3)]
        waits = [{label for lane, label, *_ in own if lane == "wait"} for own in spans]
        assert ["ids0" in own for own in waits] == needs


def test_a_wait_ends_when_the_host_goes(make_settings, corpus):
    settings = make_settings(train__steps=50)
    server, far = joined(corpus, settings, 0)
    far.read((0, 0))
    server.link.close()
    with pytest.raises(WireError, match=r"token ids of microbatch 2 of step 41 cannot be had: "):
        far.read((40, 2))
    here, far = greeted(settings)
    threading.Timer(0.1, here.close).start()
    with pytest.raises(WireError, match=r"validation batch 0 cannot be had: .*without a goodbye"):
        far.read(0)


@pytest.mark.parametrize(
    ("change", "words"), [({"id_bytes": 3}, "id_bytes"), ({"config_hash": "other"}, "config_hash")]
)
def test_what_the_host_says_is_checked(change, words, make_settings):
    settings = make_settings()
    with pytest.raises(WireError, match=words):
        greeted(settings, **change)


def mask(bits, count):
    return {"codec": 2, "payload": bytes(64) + bits + count.to_bytes(4, "little")}


@pytest.mark.parametrize(("frame", "words"), [
    ({"shape": (2, 15)}, "came"), ({"payload": b"\0" * 62}, "62 bytes"),
    ({"payload": b"\xff" * 64}, "token id 65535 came, but model.vocab = 300"),
    ({"kind": FrameKind.PIECE}, "PIECE frame"), ({"weight_version": 9}, "among token ids"),
    (mask(bytes(4), 8), "0 learned tokens came, of 8"), (mask(b"\xff" * 4, 129), "of 129"),
    (mask(b"\xff" * 4, 31), "32 learned tokens came, of 31"),
])  # fmt: skip
def test_ids_and_masks_that_do_not_fit_are_refused(frame, words, make_settings):
    has_mask = frame.get("codec") == 2
    here, far = greeted(make_settings(), stage=int(has_mask), masked=has_mask)
    right = {"kind": FrameKind.TOKENS, "codec": 1, "shape": (2, 16), "payload": bytes(64)}
    here.write(encode(Frame(**{**right, **frame})))
    with pytest.raises(WireError, match=words):
        far.read((0, 0))


@pytest.mark.parametrize("frame", [
    Frame(FrameKind.TOKENS, step=4, codec=1),
    Frame(FrameKind.TOKENS, microbatch=4, codec=1),
    Frame(FrameKind.TOKENS, microbatch=2, weight_version=1, codec=1),
    Frame(FrameKind.TOKENS, codec=1, payload=b"more"),
])  # fmt: skip
def test_what_is_no_request_ends_the_stream(frame, make_settings, corpus):
    settings = make_settings()
    here, there = memory_pair()
    serving = on_daemon_thread("server", lambda: TokenServer(here, corpus, settings))
    handshake(there, {"config_hash": settings.hash}, {}, PATIENCE)
    server = serving.result()
    link, gone = Link(there, Meter(), "peer", 1 << 20), threading.Event()
    link.start(lambda frame: None, lambda error: gone.set())
    link.send(frame)
    assert gone.wait(PATIENCE)
    assert server.link.other_end_at_fault
