"""A run that our own command wrote, pages of it, and what they are sent."""

import fcntl
import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import records
from programs import Program
from settings_values import tiny_settings
from thinwire.run.alive import ControlSocket
from thinwire.run.machine import Machine
from thinwire.run.protocol import LinkStatus, PeerStatus, StatusReport
from thinwire.run.record import read_progress, write_progress
from thinwire.schedule import Links
from thinwire.typed import to_toml
from thinwire.web.page import make_page
from thinwire.web.server import WebServer

TOKEN = "t0ken"
STEPS = 6
step_record = partial(records.step_record, stage_count=2)  # as its own


@pytest.fixture(scope="session")
def finished(text_folder, tmp_path_factory):
    """The folder of a run of `thinwire train`; nobody writes there.

    One for all workers of the tests: who comes first makes it.
    """
    shared = tmp_path_factory.getbasetemp()
    place = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "web-run"
    place.mkdir(exist_ok=True)
    with (place / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not (place / "output.txt").exists():
            _train(place, text_folder)
    return place / "first"


def _train(place, text_folder):
    changes = {
        "run__name": "first", "run__precision": "fp32", "link__emulate": True,
        "link__latency_ms": 2.0, "codec__forward": "int8", "codec__backward": "int4",
        "train__steps": STEPS, "train__checkpoint_every": 3,
    }  # fmt: skip
    settings = tiny_settings(place, text_folder, changes)
    (place / "run.toml").write_text(to_toml(settings))
    run = Program(["train", "run.toml"], os.environ["THINWIRE_CACHE"], place)
    assert run.wait() == 0, run.text()
    (place / "output.txt").write_text(run.text())


@pytest.fixture
def run_folder(finished, tmp_path):
    """A copy of it, elsewhere."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))


def let_links_decide(folder):
    """Have the record of a run say that its links take longest, whatever this machine did."""
    progress, quick = read_progress(folder), [1e-4, 1e-4]
    costs = replace(progress.measured_costs, forward=quick, backward=quick, update=quick)
    links = Links([1.0, 1.0], [1.0, 1.0], [0.002])
    write_progress(folder, replace(progress, measured_costs=costs, links=links))


@pytest.fixture
def serve():
    """Serve the page of folders."""
    servers: list[WebServer] = []

    def start(*folders, **options):
        server = WebServer(lambda: make_page(folders, **options), "127.0.0.1:0", TOKEN)
        servers.append(server.start())
        return server

    yield start
    for server in servers:
        server.close()


def messages(server, **more):
    """What a page is sent, one by one; of several runs, with their number."""
    with httpx.stream("GET", server.address + "stream", timeout=60, **more) as answer:
        kind = ""
        for line in answer.iter_lines():
            name, _, text = line.partition(": ")
            if name == "event":
                kind = text
            elif name == "data":
                message = json.loads(text)
                yield kind, message["run"], message["value"]


def first_of(server, *kinds, run=0, **more):
    """The first message of each of these kinds."""
    found: dict[str, Any] = {}
    for kind, number, value in messages(server, **more):
        if kind in kinds and (number == run or kind == "hello"):
            found.setdefault(kind, value)
        if len(found) == len(kinds):
            break
    return [found[kind] for kind in kinds]


class FakeHost:
    """Answers in the folder of a run as its host does."""

    def __init__(self, folder):
        self.peers = [self.peer("ana", [0]), self.peer("ben", [1]), self.peer("carl", [])]
        self.asked: list[dict[str, Any]] = []
        self.role, self.state, self.waiting_for = "host", "training", ""
        removed = lambda asked: self._note(asked, f"{asked['peer']} was removed")  # noqa: E731
        invited = lambda asked: self._note(asked, "thinwire join another")  # noqa: E731
        handlers = {"status": self._status, "kick": removed, "invite": invited}
        self._socket = ControlSocket(folder, handlers)
        (folder / "authority").mkdir(exist_ok=True)
        (folder / "authority" / "invite.txt").write_text("thinwire join abc-secret\n")

    @staticmethod
    def peer(name, stages, is_away=False):
        machine = Machine(name, 1.5, 8.0, 40.0, 200.0, 15.0, device="cpu (8 cores)")
        state = "away" if is_away else "has done step 4" if stages else "stands by for stage 1"
        return PeerStatus(name, state, stages, machine=None if is_away else machine)

    def close(self):
        self._socket.close()

    def _status(self, request):
        seats = {stage: peer.name for peer in self.peers for stage in peer.stages}
        links = [LinkStatus(0, seats[0], seats[1], "direct", 9e3, 6e3, 31.0)]
        return StatusReport(
            run="first", run_id="ab", role=self.role, state=self.state, time=1.8e9, epoch=1,
            waiting_for=self.waiting_for, waiting_since=1.8e9 if self.waiting_for else 0.0,
            peers=self.peers, links=links,
        ).to_plain()  # fmt: skip

    def _note(self, request, answer):
        self.asked.append(request)
        return {"text": answer}


@pytest.fixture
def host(run_folder):
    made = FakeHost(run_folder)
    yield made
    made.close()
