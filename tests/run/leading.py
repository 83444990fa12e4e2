"""What tests of the coordinator need: reports of stages, and a coordinator to tell them to."""

from thinwire.engine.checkpoint import Shard
from thinwire.engine.reports import Meters, ShardWritten, StageCosts, Step, Versions
from thinwire.run.coordinator import SETTLE_SECONDS, Coordinator, Phase
from thinwire.run.events import End, Exited, Said, StopAsked, Tick
from thinwire.run.protocol import Failed, Linked, Ready

METERS: Meters = {"cut-0": {"sent": {}, "received": {}}}


def meters(stage, stages, frames=0):
    """What the links of a stage have moved, so many frames of ten bytes on each."""
    counts = {"frames": frames, "payload_bytes": 10 * frames}
    sent = {"FORWARD": counts} if frames else {}
    cuts = [cut for cut in (stage - 1, stage) if 0 <= cut < stages - 1]
    return {f"cut-{cut}": {"sent": dict(sent), "received": {}} for cut in cuts}


def failed(error, kind="WireError", accuses=(), convicts=()):
    """What a peer sends before it leaves."""
    known = kind.endswith("Error") and kind != "ValueError"
    return Failed(kind, known, error, [*accuses], [*convicts])


def step(stage, number, stages=2, frames=0):
    return Step(
        step=number, loss=1.0 if stage == stages - 1 else None, lr=0.1, grad_norm=1.0,
        committed=True, start=0.0, end=1.0, wait=0.0, costs=StageCosts(0.1, 0.1, 0.1), spans=[],
        measures={}, meters=meters(stage, stages, frames), dropped=0,
    )  # fmt: skip


def part(stage, number, memory=""):
    shard = Shard(f"stage-{stage}.safetensors", "ab", 10, ["w"])
    return ShardWritten(number, Versions(number, 0), shard, {"0": {"forward": memory}})


def ready(stage):
    return Ready(f"at-{stage}", "", "cpu", {"torch": "2"})


class Lead:
    """A coordinator of some stages, with the time and all that it has asked for."""

    def __init__(self, patience=100.0, stages=2, **options):
        self.now, self.stages = 1000.0, range(stages)
        self.coordinator = Coordinator(stages, patience, **options)

    def on(self, event, after=0.0):
        self.now += after
        return self.coordinator.on(event, self.now)

    def say(self, stage, *messages):
        return [command for m in messages for command in self.on(Said(stage, m))]

    def all_say(self, *messages):
        return [command for stage in self.stages for command in self.say(stage, *messages)]

    def play(self, script):
        """Each stage of a script says its message."""
        return [command for stage, message in script for command in self.say(stage, message)]

    def until(self, phase):
        """Bring the run to a phase in the ordinary way."""
        ways = {
            Phase.BUILDING: lambda: None,
            Phase.LINKING: lambda: [self.say(s, ready(s)) for s in self.stages],
            Phase.TRAINING: lambda: self.all_say(Linked()),
            Phase.STOPPING: lambda: self.on(StopAsked()),
            Phase.FINISHED: lambda: [self.on(Exited(1, -9)), self.on(Tick(), SETTLE_SECONDS)],
        }
        for reached, way in ways.items():
            way()
            assert self.coordinator.phase is reached
            if reached is phase:
                return self
        raise AssertionError(phase)

    def ended(self, commands):
        """The end that these commands are."""
        assert self.coordinator.is_over
        assert self.on(Tick(), 1000.0) == [], "what is over asks for nothing"
        (end,) = (command for command in commands if isinstance(command, End))
        assert commands[-1] is end
        return end

    @property
    def is_settling(self):
        """Whether it looks for the cause of a failure."""
        return self.coordinator._settled_at is not None

    def settled(self):
        """How it ends once the moment after a failure has passed."""
        assert self.is_settling
        assert self.on(Tick(), SETTLE_SECONDS / 2) == []
        assert self.coordinator.rest(self.now) <= SETTLE_SECONDS / 2
        return self.ended(self.on(Tick(), SETTLE_SECONDS / 2))
