"""Messages are checked on arrival: what is wrong with one is its sender's error."""

import json
import math
import random
import subprocess
import sys
import zlib
from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest

from thinwire.engine import reports as rp
from thinwire.engine.checkpoint import Shard
from thinwire.errors import BreachError, ThinwireError, WireError, printable
from thinwire.report import records
from thinwire.run import protocol as pr
from thinwire.run.channel import Channel
from thinwire.run.conduct import PeerConduct
from thinwire.run.machine import Machine
from thinwire.schedule import Costs, Links
from thinwire.wire import Frame, FrameKind, Identity, Link, Meter, Route, memory_pair
from waiting import wait_until

METER = Meter()
METER.count_sent(FrameKind.FORWARD, 100)
METERS: rp.Meters = {"cut-0": {**METER.snapshot(), "received": {}}}
BOTH_METERS: rp.Meters = {**METERS, "cut-1": METERS["cut-0"]}
STEP = rp.Step(
    step=3, loss=2.5, lr=0.1, grad_norm=1.25, committed=True, start=10.0, end=11.5, wait=0.5,
    costs=rp.StageCosts(0.1, 0.2, 0.3),
    spans=[("compute", "F0", 10.0, 10.25), ("send", "F0>", 10.25, 10.5)], measures={"drift": 1e-9},
    meters=METERS, dropped=0,
)  # fmt: skip
SHARD = Shard("stage-1.safetensors", "ab" * 32, 10, ["a/b"])
WRITTEN = rp.ShardWritten(4, rp.Versions(4, 0), SHARD, {"0": {"forward": "ab", "backward": ""}})
FAILED = pr.Failed("WireError", True, "link cut-0 is broken", [0], [])
CONNECT = pr.Connect(
    "127.0.0.1:1", [0, 1], seats=["ana", "ben"], reach=[Route("a:1", "direct", "t")]
)
SPAN = records.TraceSpan(0, "compute", "F0", 0.0, 0.1)
PROGRESS = pr.RunProgress(
    step_seconds_median=0.5,
    timeline=records.Timeline("code", 3, 0.5, [], [SPAN]),
    time_shares=[{"stage": 0, "compute": 0.5}],
    cuts=[{"cut": 0, "forward_codec": "int8"}],
    measured_costs=Costs([0.1] * 2, [0.2] * 2, [0.1] * 2, [10], [20]),
    links=Links([40.0, 20.0], [200.0, 50.0], [0.01]),
)
REPORT = pr.StatusReport(
    "code", "ab", "host", "training", 10.0,
    peers=[pr.PeerStatus("ana", "computes F0", [0], last_word=4.0, machine=Machine("ana", 1.0))],
    links=[pr.LinkStatus(0, "ana", "ben", "direct", 9.0, 6.0, 31.0)],
)  # fmt: skip
STAGES = [records.StageRecord(0, "0..1", 0.1, 0.2, 0.1, "cpu")]
LINKS = [records.LinkRecord(0, 1000, 600, 0.3)]
RECORD = records.StepRecord(3, 9, 2.5, 0.1, 1.0, 50, 700.0, 0.5, 9.0, STAGES, LINKS)
NEWS, IDENTITY = pr.RunNews(REPORT, RECORD, PROGRESS), Identity("ana", "key", "host")
MESSAGES: list[Any] = [
    pr.Hello({"torch": "2.6"}, Machine("ana", tflops=1.0, memory_gb=2.0), "127.0.0.1:1", "", "ab"),
    pr.Alive(), pr.Leaving(), pr.Tried({"127.0.0.1:1": "refused"}), pr.Declined("no room"),
    pr.Pulse(7, "waits for F3 of step 2"), pr.Ready("127.0.0.1:1", "0..1", "cpu", {"torch": "2.6"}),
    pr.Linked(), pr.LinkDown(0, "the connection was lost"), pr.LinkUp(0, 1.5),
    pr.LogLost("the disk is full"), rp.Audited(9, 40, 0.05, 0.0, "gradient", 2), pr.Follows(8),
    STEP, rp.Evaluation(3, 2.0, 1.5), WRITTEN, rp.ShardFailed(4, "disk full"), pr.Finished(METERS),
    FAILED, pr.Ended.by(-9, "killed"), pr.AskAlive(),
    pr.Hold([0, 1], {"run": {}}, True, "ab", "token"),
    pr.Assignment([0], IDENTITY, {"run": {}}, "/c", "/r"), pr.Release("formed again"),
    pr.News("all is well"), records.StepRecord(1, 2, 3.0, 0.1, 1.0, 10, 5.0, 2.0, 1.0, [], []),
    records.EvaluationRecord(1, 2.0, None), NEWS, pr.TryDoor(), pr.Dismiss("over", "failed"),
    CONNECT, pr.Start(), pr.Await(0), pr.Saved(8), pr.Stop(), pr.Leave(),
]  # fmt: skip


def kinds_for(message):
    return pr.FROM_PEER if type(message) in pr.FROM_PEER.values() else pr.FROM_COORDINATOR


def sent(message, **changes):
    """A message as it travels, with some of its fields changed."""
    said = zlib.decompress(pr.pack(pr.Envelope(message, 1, 2, 4)))
    *about, body = msgspec.msgpack.decode(said)
    return zlib.compress(msgspec.msgpack.encode([*about, {**body, **changes}]))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_arrives_as_it_was_sent_and_at_its_own_end(message):
    said = pr.Envelope(message, 3, 7, 2)
    assert pr.unpack(pr.pack(said), kinds_for(message)) == said
    other = pr.FROM_COORDINATOR if kinds_for(message) is pr.FROM_PEER else pr.FROM_PEER
    with pytest.raises(WireError, match=f"a {type(message).__name__} message .* not for this end"):
        pr.unpack(pr.pack(said), other)


def test_every_kind_of_message_is_among_these():
    assert {type(message) for message in MESSAGES} == {
        *pr.FROM_PEER.values(), *pr.FROM_COORDINATOR.values()
    }  # fmt: skip


def test_a_step_s_report_is_small_and_its_times_true_to_a_microsecond():
    """Eight microbatches of an inner stage took 4.8 kB: 16 kB a step of four stages."""
    rng = random.Random(0)
    spans, now = [], 12345.678
    for number in range(8):
        for name in (f"F{number}", f"B{number}"):
            for lane, label in (("wait", name), ("compute", name), ("send", f"<{name}")):
                spans.append((lane, label, now, now + rng.uniform(0, 0.05)))
                now = spans[-1][-1]
    facts = {"start": 12345.678, "spans": spans, "loss": 1 / 3, "grad_norm": math.inf}
    report = replace(STEP, meters=BOTH_METERS, **facts)
    payload = pr.pack(pr.Envelope(report))
    assert len(json.dumps(asdict(report))) > 3000
    assert len(payload) < 700
    received = pr.unpack(payload, pr.FROM_PEER).message
    assert isinstance(received, rp.Step)
    assert (received.loss, received.grad_norm) == (1 / 3, math.inf), "exact, and may be infinite"
    for (lane, label, *times), (_lane, _label, *theirs) in zip(spans, received.spans, strict=True):
        assert (lane, label) == (_lane, _label)
        assert times == pytest.approx(theirs, abs=1.1e-6)


@pytest.mark.parametrize(("part", "change", "words"), [
    ("report", {"peers": [{"name": 3}]}, r"at `\$.report.peers\[0\].name`"),
    ("report", {"invite": "tw1"}, "unknown field `invite`"),
    ("step", {"loss": "low"}, r"at `\$.step.loss`"),
    ("progress", {"links": None}, r"at `\$.progress.links`"),
    ("progress", {"timeline": {"spans": [1]}}, r"at `\$.progress.timeline"),
])  # fmt: skip
def test_what_a_page_shows_is_checked_too(part, change, words):
    plain = msgspec.to_builtins(NEWS)
    plain[part] = {**plain[part], **change}
    payload = zlib.compress(msgspec.msgpack.encode(["RunNews", -1, 0, 0, plain]))
    with pytest.raises(WireError, match=f"a RunNews message cannot be used: .*{words}"):
        pr.unpack(payload, pr.FROM_COORDINATOR)


@pytest.mark.parametrize(("change", "words"), [
    ({"step": -1}, "a count is below 0"),
    ({"grad_norm": None}, r"at `\$.grad_norm`"),
    ({"end": math.nan}, r"at `\$.end`"),
    ({"costs": {"forward": 1.0}}, r"missing required field `backward` - at `\$.costs`"),
    *(({"costs": {"forward": 1, "backward": 1, "update": wrong}}, r"at `\$.costs.update`")
      for wrong in (-1e-9, 1e300)),
    ({"spans": ["cF0 cF1", [1, 2], [3]]}, "argument 3 is shorter"),
    ({"spans": ["cF" + "0" * 24, [1], [3]]}, "length <= 24"),
    ({"measures": dict.fromkeys(map(str, range(33)), 0.0)}, "length <= 32"),
    ({"spans": ["cF0", [math.inf], [3]]}, "times or meters cannot be read"),
    ({"meters": {"cut-0": [["FORWARD", 1, -2]]}}, "a count is below 0"),
])  # fmt: skip
def test_a_wrong_field_is_named(change, words):
    with pytest.raises(WireError, match="a Step message cannot be used: .*(" + words + ")"):
        pr.unpack(sent(STEP, **change), pr.FROM_PEER)


def test_a_machine_that_no_host_could_compute_with_is_refused():
    hello = MESSAGES[0]
    for wrong in ({"tflops": math.nan}, {"mbps_up": 1e30}, {"memory_gb": -1.0}):
        with pytest.raises(WireError, match=r"a Hello message cannot be used: .*from 0 to 1e\+09"):
            pr.unpack(sent(hello, machine={**asdict(hello.machine), **wrong}), pr.FROM_PEER)


@pytest.mark.parametrize(
    "text", [b"", b"no", b"\xff", b"\x91" * 100_000, b"1" * 5000, msgspec.msgpack.encode(["Step"])]
)
def test_what_is_no_message_is_refused(text):
    for payload in (text, zlib.compress(text), zlib.compress(text)[:-1]):
        with pytest.raises(WireError, match="message cannot be used"):
            pr.unpack(payload, pr.FROM_PEER)


def test_a_message_that_inflates_without_end_is_refused():
    with pytest.raises(WireError, match="longer than"):
        pr.unpack(zlib.compress(b" " * (pr.MOST_SAID + 1)), pr.FROM_PEER)
    with pytest.raises(WireError, match="a ShardWritten message has"):
        pr.pack(pr.Envelope(replace(WRITTEN, shard=replace(SHARD, tensors=["t" * 20] * 60_000))))


def test_mutated_messages_are_refused_or_read_but_never_crash():
    rng = random.Random(1)
    for _ in range(10_000):
        message = rng.choice(MESSAGES)
        text = bytearray(zlib.decompress(pr.pack(pr.Envelope(message))))
        for _ in range(rng.randint(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        try:
            pr.unpack(zlib.compress(text, 1), kinds_for(message))
        except WireError as error:
            assert printable(str(error)) == str(error)


def test_control_characters_of_a_peer_reach_nobody():
    error = "\x1b]0;title\x07line\nnext \x9b2J\u202eend"
    received = pr.unpack(sent(FAILED, error=error, kind="\x1b[31m"), pr.FROM_PEER).message
    assert received.error == "]0;titleline\nnext 2Jend"
    assert received.kind == "[31m"
    with pytest.raises(WireError) as refused:
        pr.unpack(zlib.compress(msgspec.msgpack.encode(["\x1b[2J", 0, 0, 0, {}])), pr.FROM_PEER)
    assert "\x1b" not in str(refused.value)
    long = pr.unpack(sent(FAILED, error="x" * 60_000), pr.FROM_PEER).message
    assert len(long.error) < 5000 and long.error.endswith("(56000 more characters)")


def test_a_report_holds_no_more_than_its_step_has():
    """It may wait for those of slower stages, and so may many others."""
    span = ("compute", "F0", 10.0, 10.25)
    PeerConduct(1, 2, microbatches=4).check(replace(STEP, spans=[span] * 104))
    with pytest.raises(WireError, match="with 105 spans"):
        PeerConduct(1, 2, microbatches=4).check(replace(STEP, spans=[span] * 105))
    shard = {**vars(SHARD), "sha256": "../../secret"}
    with pytest.raises(WireError, match=r"regex.* at `\$.shard.sha256`"):
        pr.unpack(sent(WRITTEN, shard=shard), pr.FROM_PEER)


@pytest.mark.parametrize(("message", "words"), [
    (replace(STEP, meters={}), "with meters of no link"),
    (replace(STEP, meters=BOTH_METERS), "with a loss"),
    (replace(STEP, meters=BOTH_METERS, loss=None, not_finite="x"), "with non-finite values in 'x'"),
    (rp.Evaluation(1, 1.0, 0.1), "only the last stage"),
    (pr.Finished(METERS), "with meters of cut-0"),
    (pr.LinkDown(1, "lost"), "of cut 1"),
    (pr.LinkUp(0, 1.0), "LinkUp message twice"),
    (msgspec.structs.replace(FAILED, accuses=[3]), "blames an unknown stage"),
    (msgspec.structs.replace(FAILED, convicts=[1]), "blames an unknown stage"),
    (replace(WRITTEN, shard=replace(SHARD, file="../x")), "of the file '../x'"),
])  # fmt: skip
def test_a_stage_can_speak_for_itself_alone(message, words):
    conduct = PeerConduct(1, 3)
    conduct.check(replace(STEP, step=2, meters=BOTH_METERS, loss=None))
    with pytest.raises(WireError, match=words):
        conduct.check(message)


def test_a_stage_saw_non_finite_values_only_where_it_looks():
    for stage, place in ((0, "input"), (1, "gradient"), (1, "norms")):
        seen = replace(STEP, loss=1.0 if stage else None, not_finite=place)
        with pytest.raises(WireError, match=f"non-finite values in '{place}'"):
            PeerConduct(stage, 2).check(seen)
    PeerConduct(1, 2).check(replace(STEP, not_finite="input"))


def test_steps_are_reported_one_after_the_other_and_the_last_stage_has_a_loss():
    conduct = PeerConduct(1, 2)
    with pytest.raises(WireError, match="without its loss"):
        conduct.check(replace(STEP, loss=None))
    conduct = PeerConduct(1, 2)
    conduct.check(STEP)
    conduct.check(replace(STEP, step=4))
    for wrong in (4, 6):
        with pytest.raises(WireError, match=f"Step message {wrong} after step 4"):
            conduct.check(replace(STEP, step=wrong))


def test_results_are_reported_once_and_for_the_step_that_was_done():
    """Else an enrolled peer could have the coordinator pile them up."""
    conduct = PeerConduct(0, 1)
    scored = rp.Evaluation(3, 1.0, 0.1)
    written = replace(WRITTEN, shard=replace(SHARD, file="stage-0.safetensors"))
    conduct.check(scored)  # before the first step
    conduct.check(replace(STEP, meters={}))
    conduct.check(written)
    conduct.check(replace(scored, step=4))
    failed = rp.ShardFailed(4, "disk full")
    for again in (written, failed, replace(scored, step=4)):
        with pytest.raises(WireError, match="of step 4 twice"):
            conduct.check(again)
    for other in (replace(written, step=5), replace(failed, step=3), replace(scored, step=5)):
        with pytest.raises(WireError, match="after step 4"):
            conduct.check(other)


@pytest.mark.parametrize("frame", [
    Frame(FrameKind.CONTROL, payload=b"{}"),
    Frame(FrameKind.CONTROL, payload=pr.pack(pr.Envelope(pr.Stop()))),
    Frame(FrameKind.FORWARD),
])  # fmt: skip
def test_a_channel_convicts_who_sent_it_nonsense(frame):
    ours, theirs = memory_pair()
    lost: list[ThinwireError] = []
    heard: list[pr.Envelope] = []
    channel = Channel(ours, "control of stage 0", pr.FROM_PEER, heard.append, lost.append)
    raw = Link(theirs, Meter(), "raw", 1 << 20)
    raw.start(lambda frame: None, lambda error: None)
    raw.send(frame)
    raw.close()
    wait_until(lambda: lost)
    assert isinstance(lost[0], BreachError)
    assert "link control of stage 0 is broken" in str(lost[0])
    assert heard == []
    channel.close()


def test_messages_of_two_peers_may_be_the_first_of_their_kind_at_once():
    """Where two threads first decode a type at once msgspec crashes: types are learnt at import.

    That shows in dataclasses; a Struct has it where Python does not see it.
    """
    lines = (
        "import msgspec\n"
        "learnt, learn = set(), msgspec.msgpack.Decoder\n"
        "msgspec.msgpack.Decoder = lambda kind: learnt.add(kind) or learn(kind)\n"
        "from thinwire.run.protocol import FROM_COORDINATOR, FROM_PEER\n"
        "kinds = {*FROM_PEER.values(), *FROM_COORDINATOR.values()}\n"
        "assert kinds <= learnt\n"
        "plain = [kind for kind in kinds if not issubclass(kind, msgspec.Struct)]\n"
        "assert plain and all('__msgspec_cache__' in vars(kind) for kind in plain)"
    )
    assert subprocess.run([sys.executable, "-c", lines]).returncode == 0
