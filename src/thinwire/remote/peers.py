"""The stages of a run on the machines of those who joined, as its coordinator sees them."""

import threading
import time
from collections.abc import Callable

from thinwire.engine.reports import ShardFailed, ShardWritten
from thinwire.errors import printable
from thinwire.remote.lobby import Gone, Happening, Lobby
from thinwire.remote.messages import Declined, Ended, Leaving, returncode_of
from thinwire.remote.reception import Reception
from thinwire.remote.seats import Formation
from thinwire.run.control import lasting_control
from thinwire.run.events import (
    Away,
    Back,
    Exited,
    Lost,
    Suspect,
)
from thinwire.run.messages import Connect, FromCoordinator, FromPeer
from thinwire.run.order import control_name
from thinwire.run.peers import Peers
from thinwire.run.status import Standing
from thinwire.run.transfer import ShardCollector
from thinwire.wire import Pipe

LEAST_ABSENCE_S = 10.0  # of a peer, before its stage counts as lost
LOOK_S = 1.0
EXIT_SECONDS = 10.0  # for the processes of stages to end once they have said goodbye


class RemotePeers(Peers):
    """The seats of one epoch; a context manager: leaving it ends the processes of all seats.

    `connect` adds to the word to connect how neighbours are reached, and `collect` makes what
    fetches the shards that stages have written.
    """

    def __init__(
        self,
        formation: Formation,
        lobby: Lobby,
        reception: Reception,
        outage: float,
        connect: Callable[[int, Connect], Connect],
        collect: Callable[..., ShardCollector],
        standing: Standing,
    ):
        super().__init__(len(formation.seats))
        self._formation, self._lobby, self._reception = formation, lobby, reception
        self._outage, self._connect, self._standing = outage, connect, standing
        self._words: dict[int, str] = {}  # of stages whose processes have ended
        self._ended: set[int] = set()
        self._is_over = threading.Event()
        self.leaving = ""  # the peer that asked to leave
        self.is_stopping = False
        self.collector = collect(tell=self.said.note)
        lobby.on_happening = self._on_happening

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._lobby.on_happening = lambda name, what: None
        self._reception.close()
        self.collector.close()
        self._lobby.vacate(self._formation.epoch, "the run is formed again")
        for channel in list(self._channels.values()):
            self._begin(channel.close)

    def start(self) -> None:
        for stage in self._stages:
            self._expect(stage)
        self._lobby.launch()
        self._begin(self._watch_for_absence)

    def ask_to_stop(self, who: str = "") -> None:
        self.is_stopping = True
        super().ask_to_stop(who)

    def tell(self, stage: int, message: FromCoordinator) -> None:
        if isinstance(message, Connect):
            message = self._connect(stage, message)
        super().tell(stage, message)

    def wait_for_exits(self) -> None:
        self._lobby.wait(lambda: self._ended >= set(self._stages), EXIT_SECONDS)

    def last_words(self, culprit: Suspect) -> str:
        who = f"\n  stage {culprit.stage} was held by {self._formation.seats[culprit.stage]}"
        words = "" if culprit.known else self._words.get(culprit.stage) or culprit.trace
        return who + "".join(f"\n  | {printable(line)}" for line in words.splitlines())

    def _open(self, stage: int) -> Pipe:
        name, holder = control_name(stage, self._formation.epoch), self._formation.seats[stage]

        def again(timeout: float) -> Pipe:
            return self._reception.accept(name, holder, timeout)

        first = self._reception.accept(name, holder, None)
        return lasting_control(
            first,
            again,
            self._outage,
            on_down=lambda reason: self.said.note(Away(stage, reason)),
            on_up=lambda seconds: self.said.note(Back(stage, seconds)),
        )

    def _watch_for_absence(self) -> None:
        """Note a peer that goes away before its stage has dialed: no stream would show that."""
        longest, noted = max(self._outage, LEAST_ABSENCE_S), set()
        while not self._is_over.wait(LOOK_S):
            for guest in self._lobby.guests():
                away = 0.0 if guest.is_here else time.monotonic() - guest.since
                if away < longest or guest.name not in self._formation.seats:
                    continue
                stage = self._formation.stage_of(guest.name)
                if stage not in self._channels and stage not in noted:
                    noted.add(stage)
                    self.said.note(Lost(stage, f"{guest.name} has been away for {away:.0f} s"))

    def _hear(self, stage: int, message: FromPeer) -> None:
        super()._hear(stage, message)
        self._standing.heard(stage, message)
        match message:
            case ShardWritten():
                self.collector.announce(stage, message)
            case ShardFailed(step=step, error=error):
                self.collector.give_up(step, error)

    def _on_happening(self, name: str, what: Happening) -> None:
        if name not in self._formation.seats:
            return
        stage = self._formation.stage_of(name)
        match what:
            case Leaving():
                self.leaving = self.leaving or name
                if not self.is_stopping:  # asked twice, a coordinator leaves at once
                    self.ask_to_stop(name)
            case Ended(_, code, words):
                self._words[stage] = words
                self._ended.add(stage)
                self.said.note(Exited(stage, returncode_of(code)))
            case Gone(_, reason):
                self._ended.add(stage)
                self.said.note(Lost(stage, reason))
            case Declined(_, reason):
                self.said.note(Lost(stage, f"it cannot hold its stage: {reason}"))
