"""A host's list of machines and the streams of machines to it, in this process, for tests.

All that these tests need of listeners, books and dialling is made here.
"""

import io
import os
import threading
from typing import Any

import pytest

import thinwire
from thinwire.report import PlainDisplay
from thinwire.run import protocol as pr
from thinwire.run.admission import AuthorityBook
from thinwire.run.channel import Channel
from thinwire.run.hosted import Base, HostedPeers
from thinwire.run.machine import Machine
from thinwire.run.members import SESSION_BYTES, Members
from thinwire.run.status import HostConsole, SharedDisplay, Standing
from thinwire.settings import Settings
from thinwire.wire import Identity, LastingPipe, Listener, Pipe, dial
from thinwire.wire.keys import fingerprint_of
from waiting import PATIENCE, wait_until


def hello(version=thinwire.__version__, process=""):
    machine = Machine(tflops=1.0, memory_gb=1.0)
    return pr.Hello({"thinwire": version}, machine, "", "", process, f"place {process}")


def host_of(identity):
    """The key by which a machine knows its host."""
    return fingerprint_of(identity.host)


class Joined:
    """A machine's end of its stream to the host, without the rest of a joined peer."""

    def __init__(self, address, identity, process="", is_frozen=False):
        self._address, self.identity = address, identity
        self._process, self._is_frozen = process, is_frozen
        self._session = os.urandom(SESSION_BYTES)
        self.connections: list[Pipe] = []
        self.heard: list[pr.Envelope] = []
        self.is_cut_off = False
        self.lost = threading.Event()

        def on_over(error):
            self.lost.set()

        pipe = LastingPipe(self._connect(PATIENCE), self._connect, 60.0)
        self.channel = Channel(pipe, "host", pr.FROM_COORDINATOR, self._hear, on_over)

    def arrive(self, version=thinwire.__version__):
        """Say hello."""
        self.channel.send(hello(version, self._process))
        return self

    @property
    def again(self):
        """Of the latest Hold that it has heard."""
        return max((m.again for m, *_ in self.heard if isinstance(m, pr.Hold)), default=0)

    def say(self, message, stage=-1, generation=1, again=None):
        self.channel.send(message, stage, generation, self.again if again is None else again)

    def hears(self, wanted):
        """Wait for a message, or for one of a kind."""
        wait_until(lambda: any(wanted in (m, type(m)) for m, *_ in self.heard))

    def lose_connection(self):
        self.connections[-1].close(0)

    def _connect(self, timeout):
        wait_until(lambda: not self.is_cut_off)
        name = pr.stream_name("peer", self.identity.name)
        pipe = dial(
            self._address, name, self.identity, host_of(self.identity), timeout, pr.MAX_MESSAGE
        )
        pipe.write(self._session)
        self.connections.append(self.wrap(pipe))
        return self.connections[-1]

    def wrap(self, pipe):
        """The connection as this machine uses it."""
        return pipe

    def _hear(self, said):
        self.heard.append(said)
        if said.message == pr.AskAlive() and not self._is_frozen:
            self.channel.send(pr.Alive())


class House:
    """A host's book, listener and list of members, and machines that are let in."""

    def __init__(self, folder):
        self.folder, self.book = folder, AuthorityBook(folder / "authority", "test")
        self.listener = Listener(
            self.book.identity, "127.0.0.1", 0, pr.MAX_MESSAGE, who=self.book.name_of
        )
        self.invite = self.book.invite(["127.0.0.1:1"], machines=9)
        self.members = Members(self.listener, self.book, outage=60.0)
        self.happened: list[tuple[str, Any]] = []
        self.members.on_happening = lambda name, what: self.happened.append((name, what)) or False

    def enrol(self, name):
        identity, invite = Identity.create(name, self.book.identity.public), self.invite
        self.book.enrol(invite.invite_id, invite.secret, identity.public, name)
        return identity

    def join(self, name, kind=Joined):
        """A machine that is enrolled and here."""
        joined = kind(self.listener.address, self.enrol(name)).arrive()
        wait_until(lambda: name in self.here())
        return joined

    def here(self):
        return [member.name for member in self.members.here()]

    def unfit(self):
        """Why members get no stage."""
        return {member.name: member.why_unfit for member in self.members.all()}

    def console(self, formation, settings=Settings, *more):
        standing, members = Standing("test", self.book.run_id), self.members
        invite = lambda machines: self.invite  # noqa: E731
        return HostConsole(standing, members, self.book, lambda: formation, settings, invite, *more)

    def peers(self, formation, settings, corpus):
        """Members that hold stages, as a coordinator sees them."""
        display = SharedDisplay(
            PlainDisplay(io.StringIO()), self.members.tell_all, Standing("test", "abc")
        )
        own = self.members, self.listener, self.book, lambda name: []
        base = Base(*own, self.folder, corpus, display, formation)
        return HostedPeers(base, settings, None, lambda done, total: None)


@pytest.fixture
def house(tmp_path):
    made = House(tmp_path)
    with made.members:
        yield made
    made.listener.close()
