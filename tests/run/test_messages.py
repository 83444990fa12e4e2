"""Control messages are checked on arrival: what is wrong with one is its sender's error."""

import json
import math
import random
import time
import zlib
from dataclasses import MISSING, asdict, fields, replace
from typing import Any, get_args

import pytest

from thinwire.engine.checkpoint import Shard
from thinwire.engine.reports import (
    Evaluation,
    Meters,
    ShardFailed,
    ShardWritten,
    StageCosts,
    Step,
    Versions,
)
from thinwire.errors import BreachError, ThinwireError, WireError, printable
from thinwire.run.compact import as_text, deflate
from thinwire.run.conduct import PeerConduct
from thinwire.run.control import Channel
from thinwire.run.messages import (
    Assign,
    Connect,
    Failed,
    Finished,
    FromCoordinator,
    FromPeer,
    Hello,
    LinkDown,
    Linked,
    LinkUp,
    Message,
    Pulse,
    Ready,
    Start,
    Stop,
    name_of,
    pack,
    unpack,
)
from thinwire.run.vocabulary import MOST_SAID
from thinwire.wire import Frame, FrameKind, Link, Meter, memory_pair

METER = Meter()
METER.count_sent(FrameKind.FORWARD, 100)
METERS: Meters = {"cut-0": {**METER.snapshot(), "received": {}}}
BOTH_METERS: Meters = {**METERS, "cut-1": METERS["cut-0"]}
STEP = Step(
    step=3,
    loss=2.5,
    lr=0.1,
    grad_norm=1.25,
    committed=True,
    start=10.0,
    end=11.5,
    wait=0.5,
    costs=StageCosts(0.1, 0.2, 0.3),
    spans=[("compute", "F0", 10.0, 10.25), ("send", "F0>", 10.25, 10.5)],
    measures={"drift": 1e-9},
    meters=METERS,
    dropped=0,
)
SHARD = Shard("stage-1.safetensors", "ab", 10, ["a/b"])
WRITTEN = ShardWritten(4, Versions(4, 0), SHARD, {"0": {"forward": "ab", "backward": ""}})
FAILED = Failed("WireError", True, "link cut-0 is broken", "", [0], [])
MESSAGES: list[Message] = [
    Hello(1, {"torch": "2.6"}),
    Assign({"run": {}}, corpus="/c", run_folder="/r", resume=""),
    Ready("127.0.0.1:1", "0..1", "cpu"),
    Connect("127.0.0.1:1"),
    Linked(),
    Start(),
    Stop(),
    Pulse(7, "waits for F3 of step 2"),
    LinkDown(0, "the connection was lost"),
    LinkUp(0, 1.5),
    STEP,
    Evaluation(3, 2.0, 1.5),
    WRITTEN,
    ShardFailed(4, "disk full"),
    Finished(METERS),
    FAILED,
]


def plain(message: Message) -> dict[str, Any]:
    """A message as it is before it is deflated."""
    return json.loads(zlib.decompress(pack(message)))


def deflated(message: dict[str, Any]) -> bytes:
    return deflate(as_text(message))


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
def test_every_message_arrives_as_it_was_sent(message: Message) -> None:
    assert unpack(pack(message)) == message


def test_every_kind_of_message_is_among_these() -> None:
    assert {type(message) for message in MESSAGES} == {*get_args(FromPeer | FromCoordinator)}


def test_what_no_message_may_hold_is_refused_at_its_sender() -> None:
    with pytest.raises(WireError, match="'pulse' message has begun = -1"):
        pack(Pulse(-1, "counts down"))


def test_a_step_s_report_is_small_and_its_times_true_to_a_microsecond() -> None:
    """Eight microbatches of an inner stage took 4.8 kB: 16 kB a step of four stages."""
    rng = random.Random(0)
    spans, now = [], 12345.678
    for number in range(8):
        for name in (f"F{number}", f"B{number}"):
            for lane, label in (("wait", name), ("compute", name), ("send", f"<{name}")):
                spans.append((lane, label, now, now + rng.uniform(0, 0.05)))
                now = spans[-1][-1]
    sent = replace(STEP, start=12345.678, spans=spans, meters=BOTH_METERS, loss=1 / 3)
    payload = pack(sent)
    assert len(json.dumps(asdict(sent))) > 3000
    assert len(payload) < 600
    received = unpack(payload)
    assert isinstance(received, Step) and received.loss == 1 / 3
    for (lane, label, *times), (_lane, _label, *theirs) in zip(spans, received.spans, strict=True):
        assert (lane, label) == (_lane, _label)
        assert times == pytest.approx(theirs, abs=1.1e-6)


def test_a_field_that_has_its_default_does_not_travel() -> None:
    """So a message may learn to say something rare, and its bytes stay what they were."""
    assert "not_finite" not in plain(STEP)
    sent = replace(STEP, not_finite="forward")
    assert plain(sent)["not_finite"] == "forward" and unpack(pack(sent)) == sent


def test_losses_and_norms_may_be_infinite_and_are_exact() -> None:
    sent = replace(STEP, loss=0.1 + 0.2, grad_norm=math.inf)
    assert unpack(pack(sent)) == sent


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": -1}, "'step' message has step = -1, which must be an integer, 0 or more"),
        ({"step": True}, "step = True"),
        ({"step": 10**30}, "must be an integer"),
        ({"loss": "low"}, "loss = 'low', which must be a number"),
        ({"grad_norm": None}, "grad_norm = None"),
        ({"start": math.inf}, "start = inf, which must be a finite number"),
        ({"end": 10**400}, "end = "),
        ({"committed": 1}, "committed = 1, which must be true or false"),
        ({"costs": {"forward": 1.0}}, "which must be an object of forward, backward, update"),
        ({"costs": []}, "must be an object"),
        ({"spans": ["cF0 cF1", [1, 2], [3]]}, "spans that cannot be read"),
        ({"spans": ["xF0", [1], [3]]}, "spans that cannot be read"),
        ({"spans": ["cF0", [1e400], [3]]}, "spans that cannot be read"),
        ({"spans": "all"}, "spans that cannot be read"),
        ({"measures": {"drift": "much"}}, "must be a number"),
        ({"meters": {"cut-0": {"FORWARD": [1]}}}, "meters that cannot be read"),
        ({"meters": {"cut-0": {"FORWARD": [1, -2]}}}, "must be an integer, 0 or more"),
        ({"extra": 1}, "an unknown field: 'extra'"),
        ({"loss": None, "type": "nonsense"}, "of unknown type: 'nonsense'"),
        ({"type": "exit"}, "of unknown type: 'exit'"),
        ({"type": 7}, "an object with a type"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(WireError, match=words):
        unpack(deflated({**plain(STEP), **change}))


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (message, field.name)
        for message in MESSAGES
        for field in fields(message)
        if field.default is field.default_factory is MISSING
    ],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_a_missing_field_is_named(message: Message, name: str) -> None:
    rest = {key: value for key, value in plain(message).items() if key != name}
    with pytest.raises(WireError, match=f"'{name_of(message)}' message has no field '{name}'"):
        unpack(deflated(rest))


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (message, field.name)
        for message in MESSAGES
        for field in fields(message)
        if not isinstance(message, Step)
    ],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_a_field_of_another_kind_is_named(message: Message, name: str) -> None:
    """What no field may be: a list within a list."""
    with pytest.raises(WireError, match=rf"'{name_of(message)}' message has {name} = .*must be"):
        unpack(deflated({**plain(message), name: [[[]]]}))


@pytest.mark.parametrize(
    "text", [b"", b"no", b"\xff", b"[1]", b"[" * 100_000, b"1" * 5000, b'{"type": "step"']
)
def test_what_is_no_message_is_refused(text: bytes) -> None:
    for payload in (text, zlib.compress(text), zlib.compress(text)[:-1]):
        with pytest.raises(WireError, match="control message"):
            unpack(payload)


def test_a_message_that_inflates_without_end_is_refused() -> None:
    with pytest.raises(WireError, match="longer than"):
        unpack(zlib.compress(b" " * (MOST_SAID + 1)))


def test_every_kind_has_a_size_of_its_own() -> None:
    pulse = {**plain(Pulse(1, "works")), "doing": "x" * 65_530}
    with pytest.raises(WireError, match=r"type 'pulse' has 65\d\d\d bytes, at most 65536"):
        unpack(deflated(pulse))
    many = replace(WRITTEN, shard=replace(SHARD, tensors=["t" * 20] * 40_000))
    assert unpack(pack(many)) == many
    with pytest.raises(WireError, match="type 'shard' has"):
        pack(replace(WRITTEN, shard=replace(SHARD, tensors=["t" * 20] * 60_000)))


def test_a_report_holds_no_more_than_its_step_has() -> None:
    """It may wait for those of slower stages, and so may many others."""
    span = ("compute", "F0", 10.0, 10.25)
    PeerConduct(1, 2, microbatches=4).check(replace(STEP, spans=[span] * 104))
    for wrong, words in [
        ({"spans": [span] * 105}, "with 105 spans"),
        ({"spans": [("compute", "F" * 25, 10.0, 10.25)]}, "whose name has no end"),
        ({"measures": {str(number): 0.0 for number in range(33)}}, "with 33 measures"),
    ]:
        with pytest.raises(WireError, match=words):
            PeerConduct(1, 2, microbatches=4).check(replace(STEP, **wrong))


def test_mutated_messages_are_refused_or_read_but_never_crash() -> None:
    rng = random.Random(1)
    for _ in range(20_000):
        text = bytearray(zlib.decompress(pack(rng.choice(MESSAGES))))
        for _ in range(rng.randint(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        try:
            unpack(zlib.compress(text, 1))
        except WireError as error:
            assert printable(str(error)) == str(error)


def test_control_characters_of_a_peer_reach_nobody() -> None:
    error = "\x1b]0;title\x07line\nnext \x9b2J\u202eend"
    received = unpack(deflated({**plain(FAILED), "error": error, "kind": "\x1b[31m"}))
    assert isinstance(received, Failed)
    assert received.error == "]0;titleline\nnext 2Jend"
    assert received.kind == "[31m"
    with pytest.raises(WireError) as refused:
        unpack(deflated({"type": "\x1b[2J"}))
    assert "\x1b" not in str(refused.value)
    long = unpack(deflated({**plain(FAILED), "error": "x" * 60_000}))
    assert isinstance(long, Failed)
    assert len(long.error) < 5000 and long.error.endswith("(56000 more characters)")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Hello(2, {}), "as stage 2"),
        (replace(STEP, meters={}), "with meters of no link"),
        (replace(STEP, meters=BOTH_METERS), "with a loss"),
        (
            replace(STEP, step=3, meters=BOTH_METERS, loss=None, not_finite="x"),
            "with non-finite values in 'x'",
        ),
        (Evaluation(1, 1.0, 0.1), "only the last stage"),
        (Finished(METERS), "with meters of cut-0"),
        (LinkDown(1, "lost"), "of cut 1"),
        (LinkUp(0, 1.0), "'link_up' message twice"),
        (replace(FAILED, accuses=[3]), "blames an unknown stage"),
        (replace(FAILED, convicts=[1]), "blames an unknown stage"),
        (replace(WRITTEN, shard=replace(SHARD, file="../x")), "of the file '../x'"),
    ],
)
def test_a_stage_can_speak_for_itself_alone(message: FromPeer, words: str) -> None:
    conduct = PeerConduct(1, 3)
    conduct.check(replace(STEP, step=2, meters=BOTH_METERS, loss=None))
    with pytest.raises(WireError, match=words):
        conduct.check(message)


def test_a_stage_saw_non_finite_values_only_where_it_looks() -> None:
    for stage, place in ((0, "input"), (1, "gradient"), (1, "norms")):
        seen = replace(STEP, loss=1.0 if stage else None, not_finite=place)
        with pytest.raises(WireError, match=f"non-finite values in '{place}'"):
            PeerConduct(stage, 2).check(seen)
    PeerConduct(1, 2).check(replace(STEP, not_finite="input"))


def test_the_last_stage_reports_a_loss() -> None:
    with pytest.raises(WireError, match="without its loss"):
        PeerConduct(1, 2).check(replace(STEP, loss=None))


def test_steps_are_reported_one_after_the_other() -> None:
    conduct = PeerConduct(1, 2)
    conduct.check(STEP)
    conduct.check(replace(STEP, step=4))
    for wrong in (4, 6):
        with pytest.raises(WireError, match=f"'step' message {wrong} after step 4"):
            conduct.check(replace(STEP, step=wrong))


def test_results_are_reported_once_and_for_the_step_that_was_done() -> None:
    """Else an enrolled peer could have the coordinator pile them up."""
    conduct = PeerConduct(0, 1)
    scored = Evaluation(3, 1.0, 0.1)
    written = replace(WRITTEN, shard=replace(SHARD, file="stage-0.safetensors"))
    conduct.check(scored)  # before the first step
    conduct.check(replace(STEP, meters={}))
    conduct.check(written)
    conduct.check(replace(scored, step=4))
    failed = ShardFailed(4, "disk full")
    for again in (written, failed, replace(scored, step=4)):
        with pytest.raises(WireError, match="of step 4 twice"):
            conduct.check(again)
    for other in (replace(written, step=5), replace(failed, step=3), replace(scored, step=5)):
        with pytest.raises(WireError, match="after step 4"):
            conduct.check(other)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(FrameKind.CONTROL, payload=b"{}"),
        Frame(FrameKind.CONTROL, payload=pack(Stop())),
        Frame(FrameKind.FORWARD),
    ],
)
def test_a_channel_convicts_who_sent_it_nonsense(frame: Frame) -> None:
    ours, theirs = memory_pair()
    lost: list[ThinwireError] = []
    heard: list[Message] = []
    channel = Channel(ours, "control of stage 0", FromPeer, heard.append, lost.append)
    raw = Link(theirs, Meter(), None, "raw", 1 << 20)
    raw.start(lambda frame: None, lambda error: None)
    raw.send(frame)
    raw.close()
    while not lost:
        time.sleep(0.01)
    assert isinstance(lost[0], BreachError)
    assert "link control of stage 0 is broken" in str(lost[0])
    assert heard == []
    channel.close()
