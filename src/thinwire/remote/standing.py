"""How a run over several machines stands, noted as it goes on, for whoever asks."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.engine.reports import Step
from thinwire.remote.messages import StepNews
from thinwire.remote.status import LinkStatus, PeerStatus, StatusReport
from thinwire.report import StepRecord
from thinwire.run.messages import FromPeer, LinkDown, Linked, LinkUp, Pulse

Stepped = StepRecord | StepNews
"""A step as the host knows it, or as it tells its peers."""


@dataclass
class _Stage:
    """What the host last heard of a stage."""

    heard: float = 0.0
    doing: str = ""


@dataclass
class _Cut:
    """The link over a cut."""

    way: str = ""
    down_since: float = 0.0
    reason: str = ""
    forward_bytes_per_s: float = 0.0
    backward_bytes_per_s: float = 0.0


@dataclass
class Standing:
    """Notes of one run; every method may be called on any thread."""

    run: str
    run_id: str
    role: str
    state: str = "starting"
    _step: Stepped | None = None
    _waiting_for: str = ""
    _waiting_since: float = 0.0
    _stages: dict[int, _Stage] = field(default_factory=dict)
    _cuts: dict[int, _Cut] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _now: Callable[[], float] = time.time

    def forms(self) -> None:
        """The run is formed, or formed again: what was known of stages and links holds no more."""
        with self._lock:
            self.state, self._waiting_for = "forming", ""
            self._stages, self._cuts = {}, {}

    def waits(self, what: str) -> None:
        """The run waits; as long as it does, the beginning of the wait stays."""
        with self._lock:
            if not self._waiting_for:
                self._waiting_since = self._now()
            self._waiting_for, self.state = what, "waiting"

    def goes_on(self, state: str) -> None:
        """The wait is over."""
        with self._lock:
            self._waiting_for, self.state = "", state

    def stepped(self, step: Stepped) -> None:
        """A step was made."""
        with self._lock:
            self._step, self._waiting_for, self.state = step, "", "training"

    def crossed(self, cut: int, forward_bytes: int, backward_bytes: int, seconds: float) -> None:
        """What crossed a cut in a step of so many seconds."""
        with self._lock:
            noted = self._cuts.setdefault(cut, _Cut())
            if seconds > 0:
                noted.forward_bytes_per_s = forward_bytes / seconds
                noted.backward_bytes_per_s = backward_bytes / seconds

    def heard(self, stage: int, message: FromPeer) -> None:
        """A stage has said something on its control stream."""
        with self._lock:
            noted = self._stages.setdefault(stage, _Stage())
            noted.heard = self._now()
            match message:
                case Pulse(_, doing):
                    noted.doing = doing
                case Step(step=step):  # a pulse is seconds old by now
                    noted.doing = f"has done step {step + 1}"
                case Linked(way) if stage > 0:
                    self._cuts.setdefault(stage - 1, _Cut()).way = way or "direct"
                case LinkDown(cut, reason):
                    down = self._cuts.setdefault(cut, _Cut())
                    down.down_since, down.reason = self._now(), reason
                case LinkUp(cut, way=way):
                    up = self._cuts.setdefault(cut, _Cut())
                    up.down_since, up.way = 0.0, way or up.way

    def last_word(self, stage: int) -> float:
        """When a stage was last heard, in seconds since 1970; 0 for never."""
        with self._lock:
            return self._stages.get(stage, _Stage()).heard

    def doing(self, stage: int) -> str:
        """What a stage says that it does."""
        with self._lock:
            return self._stages.get(stage, _Stage()).doing

    def report(
        self,
        epoch: int,
        seats: list[str],
        peers: list[PeerStatus],
        last_checkpoint: int | None = None,
    ) -> StatusReport:
        """How the run stands now, with these peers in these seats."""
        with self._lock:
            step, now = self._step, self._now()
            waiting_for, since = self._waiting_for, self._waiting_since
            links = [self._link(cut, seats) for cut in range(len(seats) - 1)]
            down = [(cut, noted) for cut, noted in self._cuts.items() if noted.down_since]
            if down and not waiting_for and len(seats) > 1:
                cut, noted = min(down, key=lambda row: row[1].down_since)
                ends = f"{seats[cut]} and {seats[cut + 1]}"
                waiting_for = f"the link between {ends}, which is down ({noted.reason})"
                since = noted.down_since
            loss = step.loss if step is not None and math.isfinite(step.loss) else None
            return StatusReport(
                run=self.run,
                run_id=self.run_id,
                role=self.role,
                state=self.state,
                time=now,
                epoch=epoch,
                step=step.step if step else 0,
                steps=step.steps if step else 0,
                loss=loss,
                tokens_per_s=_finite(step.tokens_per_s) if step else 0.0,
                waiting_for=waiting_for,
                waiting_since=since if waiting_for else 0.0,
                last_checkpoint=last_checkpoint,
                peers=peers,
                links=links,
            )

    def _link(self, cut: int, seats: list[str]) -> LinkStatus:
        noted = self._cuts.get(cut, _Cut())
        return LinkStatus(
            cut,
            seats[cut],
            seats[cut + 1],
            "" if noted.down_since else noted.way,
            _finite(noted.forward_bytes_per_s),
            _finite(noted.backward_bytes_per_s),
        )


def _finite(number: float) -> float:
    return number if math.isfinite(number) else 0.0
