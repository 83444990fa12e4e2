"""The members that hold the stages of one generation of a hosted run, as its coordinator sees them.

Stages that are lost are given to others, those who hold nothing follow stages, and what members
open beside their own streams is served: states, shards and token ids.
"""

import contextlib
import dataclasses
import math
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from thinwire.background import on_daemon_thread
from thinwire.data import Corpus
from thinwire.engine.audit import DRIFTED
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.reports import Audited, ShardFailed, ShardWritten
from thinwire.engine.state import ShardCheck, most_shard_bytes
from thinwire.errors import BreachError, ConfigError, ThinwireError, WireError, printable
from thinwire.run import events as ev
from thinwire.run import protocol as msg
from thinwire.run.admission import AuthorityBook
from thinwire.run.coordinator import Coordinator
from thinwire.run.formation import Formation, Placing, stage_names, write_formation
from thinwire.run.members import Happening, Member, Members, ignore, one_line
from thinwire.run.peers import Peers, placement
from thinwire.run.record import RunRecord
from thinwire.run.status import SharedDisplay, doubt_text
from thinwire.run.tokens import TokenServer
from thinwire.run.transfer import SeatServer, ShardCollector, incoming_folder
from thinwire.settings import Settings
from thinwire.wire import LastingPipe, Listener, Meter, Pipe, Route, ping

REMIND_SECONDS = 60.0  # between two lines on a wait that goes on
LOOK_SECONDS = 1.0
PROBE_SECONDS = 3.0
ANSWER_SECONDS = 3.0  # for whoever had lost stages to say that it is there
AWAY_TICK = 0.1  # between two looks at who is back, while somebody is away and stages wait
STANDBY_PAUSE = 5.0  # between a stand-by that was lost and the next one
IsDue = Callable[[], bool]  # whether something may still come

# How neighbours on other machines reach each other: the stage below accepts, so it waits at doors;
# the one above dials. A link is direct where either end has a door that can be reached, and goes
# by the relay or the host's door where neither has.
Door = tuple[str, str]  # of a member: its address for its own processes, for others if it is open


def ways_to_meet(
    stage: int, doors: Sequence[Door], met: list[Route], token: str
) -> tuple[list[Route], list[Route]]:
    """By which routes a stage reaches the one below, and at which it waits for the one above: by
    the doors of their members, to which the token is the key, and where it meets any (`met`).
    """

    def ways(*addresses: str) -> list[Route]:
        return [*(Route(one, "direct", token) for one in addresses if one), *met]

    own, _ = doors[stage]
    reach = [way for _, outside in doors[:stage][-1:] for way in ways(outside, own)]
    wait = [way for _, outside in doors[stage + 1 :][:1] for way in ways(own, outside)]
    return reach, wait


def probe_all(members: list[Member], book: AuthorityBook) -> None:
    """Try whether the doors of several members can be reached from outside, all at once."""

    def look(member: Member) -> None:
        token = book.door_token(member.name)
        member.is_reachable = is_open(member.hello, member.origin, book.run_id, token)

    for looking in [on_daemon_thread("thinwire probe", partial(look, one)) for one in members]:
        looking.result()


def is_open(hello: msg.Hello | None, origin: str, run: str, token: str) -> bool:
    """Whether a member's door is open, tried where its own stream comes from: nowhere else."""
    if hello is None or not origin or hello.outside.rpartition(":")[0].strip("[]") != origin:
        return False
    with contextlib.suppress(WireError):
        ping(Route(hello.outside, "direct", token), f"{run}/control", PROBE_SECONDS)
        return True
    return False


@dataclass
class Base:
    """What all generations of a run share."""

    members: Members
    listener: Listener
    book: AuthorityBook
    meeting: Callable[[str], list[Route]]  # where a member meets those that it cannot reach
    folder: Path
    data: Corpus
    display: SharedDisplay
    formation: Formation  # the latest
    beside: dict[str, Meter] = field(  # what travels beside the cuts, by what it is
        default_factory=lambda: {"checkpoints": Meter(), "states": Meter(), "token ids": Meter()}
    )
    fed_bytes: int = 0  # that stages sent to those who stand by for their neighbours
    record: RunRecord | None = None  # of the last generation that trained

    def keep(self, formation: Formation) -> None:
        """Write a placement down before any member hears of it."""
        self.formation = formation
        write_formation(self.folder, formation)

    def beside_bytes(self) -> dict[str, int]:
        """Every byte of that so far, both ways, frame headers included."""
        moved = {what: meter.moved_bytes() for what, meter in self.beside.items()}
        return {**moved, **({"frames to stand-bys": self.fed_bytes} if self.fed_bytes else {})}


class HostedPeers(Peers):
    """The members that hold the stages of one generation, as its coordinator sees them."""

    def __init__(
        self,
        base: Base,
        settings: Settings,
        checkpoint: Checkpoint | None,
        on_progress: Callable[[int, int], None],
    ):
        super().__init__(len(base.formation.seats))
        self._base, self._settings, self._checkpoint = base, settings, checkpoint
        self._lost: set[int] = set()  # stages whose holders of before are not heard any more
        self._homeless: list[list[int]] = []  # ... for which one is sought
        self._asked_at = 0.0  # when members were asked whether they are there
        self._alone_at = 0.0  # when no member could be reached
        self._again = 0  # how often stages were given anew
        self._given: dict[tuple[str, int], int] = {}  # by member and stage: as of which of these
        self._groups = base.formation.groups()  # the stages that share a process
        self._is_saved = False  # a checkpoint is complete since the placement was last looked at
        self._collected: set[str] = set()  # members whose shards are fetched
        self._standbys = base.display.standing.standbys
        self._standby_after = 0.0  # no other stand-by begins before
        self._doubted: set[tuple[str, str, int]] = set()  # who sent other values, by whom, of what
        self._replaces = bool(placement(settings, self._groups))  # those who are lost
        self._links = f"epoch/{base.formation.epoch}.{secrets.token_hex(16)}"
        # What ends the names of links: by the stages of who follows, of the holders by ().
        self._words: defaultdict[tuple[int, ...], str] = defaultdict(lambda: secrets.token_hex(8))
        self._ended: dict[int, str] = {}  # stages whose processes have ended: their last words
        self._states = contextlib.ExitStack()  # that are served, until all stages have theirs
        self._tried: set[str] = set()  # members whose doors are, since they hold what they do
        self._is_over = self._is_waiting = self.is_training = False
        self.pauses = ""  # why the run is to be formed again, if all is in good order
        self.unsaved: set[int] = set()  # steps of which members could not write their parts
        self._unable: set[str] = set()  # these members, as long as they could train
        self.is_stopping = False
        self.collector = ShardCollector(
            base.folder,
            [most_shard_bytes(settings, stage) for stage in self._stages],
            ShardCheck(settings, base.data, incoming_folder(base.folder)).objection,
            patience=settings.run.patience,
            meter=base.beside["checkpoints"],
            on_progress=on_progress,
            tell=self.said.note,
        )

    def __exit__(self, *error: object) -> None:
        self._base.members.on_happening = ignore
        self._is_over = True
        self._states.close()
        self.collector.close()
        for name in [*self._base.formation.members(), *self._standbys.values()]:
            self._tell(name, msg.Release("the run is formed again"))

    def start(self) -> None:
        self._base.members.on_happening = self._on_happening
        for stages in self._groups:
            name = self._base.formation.seats[stages[0]]
            if not self._give(stages, name):
                self._lose(stages, f"{name} is away")

    def _give(self, stages: list[int], name: str, follows: bool = False) -> bool:
        """Have a member hold stages from the last checkpoint on; False if it is away."""
        self._given |= {(name, stage): self._again for stage in stages}
        if not follows:
            self._collect(name)
        generation, again = self._base.formation.epoch, self._again
        began, checkpoint = msg.OF_NO_STEP, self._checkpoint
        if again:
            began = checkpoint.step if checkpoint else 0
        if self.saved:
            checkpoint = Checkpoint.open(self.saved, allow_plugins=True)

        def is_due() -> bool:
            """Whether they are the member's still, and not given anew: it dials by other names."""
            whose = self._standbys.get(tuple(stages)), self._base.formation.seats[stages[0]]
            return name in whose and self._given[name, stages[0]] == again

        def serve_tokens(stream: str) -> None:
            accept = partial(self._accept, stream, name, is_due)
            outage = max(self._settings.link.outage, msg.LEAST_OUTAGE_S)
            pipe = LastingPipe(accept(math.inf), accept, outage)
            TokenServer(pipe, self._base.data, self._settings, self._base.beside["token ids"])

        if checkpoint is not None:
            on_gone = partial(self.said.note, ev.FollowerLost(stages)) if follows else None
            meter = self._base.beside["states"]
            server = SeatServer(checkpoint, self._settings, meter, on_gone)
            self._states.callback(server.close)
            stream = msg.stream_name("state", stages[0], generation, again)
            self._serve(stream, name, partial(server.serve, stages=tuple(stages)), is_due)
        for stage in stages:
            stream = msg.stream_name("tokens", stage, generation, again)
            on_daemon_thread("thinwire tokens", partial(serve_tokens, stream))
        plain, corpus = self._settings.to_plain(), self._base.data.fingerprint
        resumes = checkpoint is not None
        return self._tell(
            name, msg.Hold(stages, plain, resumes, corpus, self._links, began, again, follows)
        )

    def _accept(self, stream: str, name: str, is_due: IsDue, timeout: float) -> Pipe:
        """Wait for a member to dial by this name, while it may; whoever else does is refused."""
        deadline = time.monotonic() + timeout
        while not self._is_over and is_due() and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(WireError):  # nobody came: look whether to go on
                return self._base.listener.accept(stream, min(left, LOOK_SECONDS / 2), name)
            time.sleep(0.01)  # the listener may be closed, and then says so at once
        raise WireError(f"nobody waits for {stream!r} any more")

    def _serve(
        self, stream: str, name: str, handle: Callable[[Pipe], None], is_due: IsDue = lambda: True
    ) -> None:
        """Handle one stream of this name after the other, on a thread of its own."""

        def run() -> None:
            while not self._is_over and is_due():
                with contextlib.suppress(ThinwireError):  # the member dials again
                    handle(self._accept(stream, name, is_due, math.inf))

        threading.Thread(target=run, name=f"thinwire {stream}", daemon=True).start()

    def _tell(self, name: str, message: Any, stage: int = msg.OF_NO_STAGE) -> bool:
        return self._base.members.tell(name, message, stage, self._base.formation.epoch)

    def on_begin(self) -> None:
        self._states.close()
        self.is_training = True

    def replace(self, stages: list[int], by_follower: bool = False) -> None:
        self.said.forget(stages)
        self._lost |= {*stages}
        if not by_follower:
            self._homeless.append(stages)
            self._ask_who_is_there()
        elif name := self._standbys.get(tuple(stages), ""):
            self._take_seat(stages, name)
            self._forget_standby(stages)  # behind it: its streams are served all along
            self._collect(name)
            self._base.display.announce("form", f"{stage_names(stages)}: {name}, which stood by")
        else:  # it has just got other stages
            self._lose(stages, "who stood by for it does so no more")

    def next_event(self, coordinator: Coordinator) -> ev.Event:
        somebody_is_away = self._give_up_the_absent()
        if self.is_training and not self._homeless and not self.is_stopping:
            self._use_who_holds_nothing()
        self._is_saved = False
        for stages in [*self._homeless]:
            self._find_holder(stages)
        rest = coordinator.rest(time.monotonic())
        return self.said.next(min(rest, AWAY_TICK) if somebody_is_away or self._homeless else rest)

    def _ask_who_is_there(self) -> None:
        """A machine may be frozen while its stream is open: who is to hold stages answers first."""
        self._asked_at = time.monotonic()
        for member in self._base.members.here():
            self._base.members.tell(member.name, msg.AskAlive())

    def _find_holder(self, stages: list[int]) -> None:
        """Give lost stages to whoever is best for them, or wait for somebody who is."""
        waited, display = time.monotonic() - self._asked_at, self._base.display
        placing = self._placing(lambda member: member.heard >= self._asked_at)
        best, name = self._placing().holder(stages), placing.holder(stages)
        if (name is None or name != best) and waited < ANSWER_SECONDS:
            return  # a better one may answer: a spare, or whoever had them and has the files
        before = self._base.formation.seats[stages[0]]
        if name is None and before in self._unable & {one.name for one in self._base.members.up()}:
            name = before  # it cannot save, but nobody else can even train them
        which = stage_names(stages)
        if name is None:
            if waited > REMIND_SECONDS or not self._is_waiting:
                self._is_waiting = True
                display.standing.waits(f"a peer for {which}")
                display.announce("wait", f"waiting for a peer that can hold {which}")
                self._ask_who_is_there()
            return
        self._homeless.remove(stages)
        self._is_waiting = False
        self._again += 1
        for group in placing.displaced(stages, name):
            self.drop_follower(group)
            self.said.note(ev.FollowerLost(group))
        self._take_seat(stages, name)
        display.announce("form", f"{which}: {name}, from the last checkpoint and the logs")
        if self._give(stages, name):
            self.said.note(ev.Given(stages))
        else:
            self._lost |= {*stages}
            self._homeless.append(stages)

    def _use_who_holds_nothing(self) -> None:
        """Have members that hold nothing take stages over, follow some, or share them."""
        placing = self._placing()
        if self._is_saved and (found := placing.next_move()):
            stages, crowded, name = found
            moves = f"{stage_names(stages)} moves from {crowded} to {name}"
            self.said.note(ev.MoveAsked(stages, moves))
        if self._replaces and time.monotonic() >= self._standby_after:
            self._find_standby()
        if len(self._groups) == 1 and (sharer := placing.next_share()) is not None:
            self._pause(f"{sharer} takes some of the stages, which one machine holds")

    # Stand-bys: members that hold nothing, and follow stages whose loss would cost most

    def _find_standby(self) -> None:
        stages, name = self._placing().next_standby()
        if name is not None:
            self._again += 1
            self._standbys[tuple(stages)] = name
            self._tried.discard(name)
            if not self._give(stages, name, follows=True):
                self._forget_standby(stages)
        elif stages:
            self._standby_after = time.monotonic() + STANDBY_PAUSE

    def _on_audited(self, name: str, stage: int, found: Audited) -> None:
        """Whoever stands by for a stage says how what it computes stands against what that sent."""
        display, holder = self._base.display, self._base.formation.seats[stage]
        display.standing.audits[name] = found
        group = next(group for group in self._groups if stage in group)
        if holder == name or self._lost or self.is_stopping or not self.is_training:
            return  # it has just taken that stage's place, or others are replaced
        if not found.tensor:
            # What has drifted so far finds only what is as far: it begins at a newer checkpoint.
            if found.difference >= DRIFTED:
                self.said.note(ev.FollowerLost(group))
            return
        replaces = self._settings.train.audit_replaces
        if (holder, name, stage) not in self._doubted:  # once is enough, whatever it says
            self._doubted.add((holder, name, stage))
            display.announce("audit", doubt_text(stage, holder, name, found))
            if replaces:
                reason = f"{name} computed other values than it sent for stage {stage}"
                self._base.members.set_aside(holder, reason)
        if replaces:
            note = f"stage {stage} is replaced by its stand-by, for it sent other values"
            self.said.note(ev.MoveAsked(group, note, at_once=True))

    def _placing(self, counts: Callable[[Member], bool] = lambda member: True) -> Placing:
        """Who holds and follows what. `counts`: whether a member that is here can be chosen."""
        here = [member.machine for member in self._base.members.here() if counts(member)]
        seats, standbys = self._base.formation.seats, dict(self._standbys)
        return Placing(self._settings, self._groups, seats, standbys, here)

    def _forget_standby(self, stages: list[int]) -> str:
        """Who followed these stages, and does so no more; nobody: nothing."""
        name = self._standbys.pop(tuple(stages), "")
        self._words.pop(tuple(stages), None)
        if name not in self._standbys.values():
            self._base.display.standing.audits.pop(name, None)
        return name

    def drop_follower(self, stages: list[int]) -> None:
        if name := self._forget_standby(stages):
            self._standby_after = time.monotonic() + STANDBY_PAUSE  # it may fail again at once
            self._tell(name, msg.Release("its stage is placed anew", stages))

    def _take_seat(self, stages: list[int], name: str) -> None:
        """Note who holds stages from now on, and let go of whoever did."""
        before = self._base.formation.seats[stages[0]]
        if before != name:  # first, for shards are fetched from who holds their stages
            self.collector.retract(stages)
        try:
            self._base.keep(self._base.formation.given(stages, name))
        except ConfigError as error:  # a full disk: only a host that is started anew would read it
            self._base.display.note(f"{error}; the run goes on")
        self._lost -= {*stages}
        for stage in stages:
            self._ended.pop(stage, None)
        if before != name:
            self._tell(before, msg.Release(f"{name} holds {stage_names(stages)} now", stages))
        self._words.clear()  # whoever follows the stage beside it is fed from elsewhere
        self._tried -= {before, name}

    def _give_up_the_absent(self) -> bool:
        """Have others hold what an absent member holds; whether one is waited for."""
        now, is_waiting = time.monotonic(), False
        for member in self._base.members.all() if self._replaces else ():
            held = self._heard_of(member.name)
            if not held or not member.is_down:
                continue
            placing, since = self._placing(), max(member.down_since, self._alone_at)
            limit = placing.patience(held)
            if not placing.here:
                self._alone_at = now  # all are away, so it may be this machine: they get their time
            if limit is None or now - since <= limit:
                is_waiting = True
            else:
                self._lose(held, f"{member.name} could not be reached for {limit:g} s")
        return is_waiting

    def _heard_of(self, name: str) -> list[int]:
        """The stages that a member holds and has not lost."""
        return [s for s in self._base.formation.held_by(name) if s not in self._lost]

    def tell(self, stage: int, message: msg.ToStage, follows: bool = False) -> None:
        self._is_saved |= isinstance(message, msg.Saved)
        placing = self._placing()
        name = placing.followed.get(stage, "") if follows else placing.seats[stage]
        if not name:
            return
        if isinstance(message, msg.Connect):
            message = self._connect(stage, message, follows)
        self._tell(name, message, stage)

    def ask_to_stop(self, why: str = "") -> None:
        self.is_stopping = True
        super().ask_to_stop(why)

    def last_words(self, culprit: ev.Suspect) -> str:
        who = f"\n  stage {culprit.stage} was held by {self._base.formation.seats[culprit.stage]}"
        words = "" if culprit.known else self._ended.get(culprit.stage, "")
        return who + "".join(f"\n  | {printable(line)}" for line in words.splitlines())

    def _connect(self, stage: int, told: msg.Connect, follows: bool) -> msg.Connect:
        """With the ways to neighbours; for what feeds a follower, as if that held its stages."""
        fed = stage if follows or told.cut is None else msg.other_end(told.cut, stage)
        groups = [group for group in self._standbys if fed in group and told.follower]
        book, followed = self._base.book, groups[0] if groups else ()
        seats = self._base.formation.given([*followed], self._standbys.get(followed, "")).seats
        members = {one.name: one for one in self._base.members.all()}
        probe_all([members[name] for name in {*seats} & members.keys() - self._tried], book)
        self._tried |= {*seats}
        doors = [members[name].door if name in members else ("", "") for name in seats]
        met, keys = self._base.meeting(seats[stage]), [*map(book.key_of, seats)]
        reach, wait = ways_to_meet(stage, doors, met, self._links)
        word = self._words[followed]  # both ends of a link need the same
        return dataclasses.replace(
            told, seats=keys, run=book.run_id, word=word, reach=reach, wait=wait
        )

    def _collect(self, name: str) -> None:
        if name not in self._collected:
            self._collected.add(name)
            base, fetch = self._base, self.collector.collect_from
            collect = partial(fetch, name, lambda: base.formation.held_by(name))
            self._serve(msg.stream_name("store", name), name, collect)

    def _on_happening(self, name: str, what: Happening) -> bool:
        """On the thread of a member's stream, which waits where its stages say too much."""
        placing, held = self._placing(), self._heard_of(name)
        message = what.message if isinstance(what, msg.Envelope) else what
        declined = message.stages if isinstance(message, msg.Declined) else []
        is_current = False
        if isinstance(what, msg.Envelope):
            is_current = what.generation == self._base.formation.epoch
            about = [what.stage] if what.stage >= 0 else declined
            given = {stage: self._given.get((name, stage)) for stage in about if is_current}
            if never := [stage for stage, again in given.items() if again is None]:
                raise BreachError(f"{name} sent a message of stage {never[0]}, which it never held")
            if any(again != what.again for again in given.values()):
                return False  # of a process whose place another has got, here
            if what.stage >= 0:
                return is_current and self._on_said(name, what.stage, what.message)
        if isinstance(message, ev.Lost | ev.Away | msg.Leaving | msg.Declined):
            for group in placing.followed_by(name):
                if not declined or not {*group}.isdisjoint(declined):
                    self.said.note(ev.FollowerLost(group))
        match message:
            case msg.Hello() | msg.Alive():
                self.said.note(ev.Tick())  # somebody may be waited for
            case ev.Back() if not held:
                self._tell(name, msg.Release("others hold its stages now"))
            case _ if not held:
                pass
            case msg.Leaving():
                self._on_leaving(name, held)
            case msg.Declined(reason, stages) if is_current:
                lost = [stage for stage in held if stage in stages or not stages]
                self._unable.discard(name)
                self._lose(lost, f"it cannot hold its stage: {one_line(reason)}")
            case ev.Lost(_, reason, in_breach):
                self._lose(held, reason, in_breach)
            case ev.Away() | ev.Back():
                self.said.note(msgspec.structs.replace(message, stage=held[0]))
        return False

    def _on_said(self, name: str, stage: int, message: msg.OfStage) -> bool:
        """A member speaks of a stage that it holds or follows; of any other it is talk."""
        if self._placing().followed.get(stage) == name:
            self.said.note(ev.Said(stage, message, follows=True))
            if isinstance(message, Audited):
                self._on_audited(name, stage, message)
            return False
        if stage not in self._heard_of(name):
            return False
        if isinstance(message, ShardFailed) and self._moves_from(stage, message):
            return True
        if isinstance(message, msg.Ended):
            self._ended[stage] = message.words
        self.said.hear(stage, message)
        self._base.display.standing.heard(stage, message)
        match message:
            case ShardWritten():
                self.collector.announce(stage, message)
            case ShardFailed(step=step, error=error):
                self.collector.give_up(step, error)
            case msg.Finished(fed_bytes=fed):
                self._base.fed_bytes += max(0, fed)
                self.is_training = False  # the run is at its end
        return True

    def _moves_from(self, stage: int, failed: ShardFailed) -> bool:
        """Whether others take a stage whose holder cannot write its part of a checkpoint."""
        name, reason = self._base.formation.seats[stage], one_line(failed.error)
        group = next(group for group in self._groups if stage in group)
        self.unsaved.add(failed.step)
        self._unable.add(name)
        self._base.members.set_aside(name, reason, for_good=False)
        if not self._replaces or self._placing().patience(group) is None:
            return False
        self._lose(group, reason)
        return True

    def _on_leaving(self, name: str, held: list[int]) -> None:
        """Others take its stages; where nobody can, the run stops with a checkpoint."""
        others = self._placing(lambda member: member.name != name)
        can_move = self.is_training and self._replaces and not self.is_stopping
        if can_move and others.patience(held) is not None:
            self._lose(held, f"{name} leaves")
        else:
            self._pause(f"{name} leaves")

    def _pause(self, why: str) -> None:
        """Have the run stop with a checkpoint; at once where lost stages let no step end."""
        self.pauses = self.pauses or why
        times = 0 if self.is_stopping else 2 if self._homeless else 1
        for _ in range(times):  # asked twice, a coordinator leaves at once
            self.ask_to_stop(why)

    def _lose(self, stages: list[int], reason: str, in_breach: bool = False) -> None:
        """Stages are lost: nothing more is heard of them until somebody holds them again."""
        self._lost |= {*stages}
        for stage in stages:
            self.said.note(ev.Lost(stage, reason, in_breach))
