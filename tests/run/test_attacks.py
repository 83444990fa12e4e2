"""What an outsider, a member or a host could try while lost stages are replaced, and what it gets;
docs/guarantees.md has the table of all attacks and their tests.
"""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import pytest

from thinwire.engine.worker import Worker
from thinwire.errors import BreachError, WireError
from thinwire.run.formation import Formation
from thinwire.run.peer import Peer
from thinwire.run.protocol import Connect, Hold, Start
from thinwire.wire import handshake, memory_pair
from thinwire.wire.frame import Frame, FrameKind, encode
from thinwire.wire.logged import FrameLog, LinkState, LoggedPipe
from waiting import PATIENCE, wait_until

# A member that was removed, and a stranger


def test_who_was_removed_is_told_neither_word_nor_stage_of_what_follows(
    house, make_settings, corpus
):
    """Links are called by another word, and by the key of the new holder."""
    ana, ben = house.join("ana"), house.join("ben")
    settings = make_settings(pipeline__stages=2)
    with house.peers(Formation(1, ["ana", "ben"]), settings, corpus) as peers:
        peers.start()
        peers.tell(0, Connect("", [0]))
        ana.hears(Connect)
        cleo = house.join("cleo")
        house.members.kick("ben")
        wait_until(lambda: "ben" not in house.here())
        peers.replace([1])
        soon = SimpleNamespace(rest=lambda now: 0.02)
        wait_until(lambda: peers.next_event(soon) and _heard(cleo, Hold))
        peers.tell(0, Connect("", [1], 0))
        peers.tell(1, Start())
        cleo.hears(Start())
        wait_until(lambda: len(_heard(ana, Connect)) == 2)
        first, again = _heard(ana, Connect)
        assert first.word != again.word
        assert again.seats == [house.book.key_of(name) for name in ("ana", "cleo")]
        assert not _heard(ben, Start) and not _heard(ben, Connect)


def _heard(joined, kind):
    return [said.message for said in joined.heard if isinstance(said.message, kind)]


# A neighbour that lies about where it stands


class Cut:
    """The end of a cut whose other end is replaced, and what the new one says and gets."""

    def __init__(self, folder):
        state = LinkState(FrameLog(folder, 1 << 20))
        here, self._gone = memory_pair()
        self.pipe = LoggedPipe(here, state)
        for number in range(4):
            self.pipe.write(encode(Frame(FrameKind.FORWARD, 0, number, payload=b"x")))
        self.pipe.await_another()
        new = LinkState(FrameLog(folder / "new", 1), 0, True)
        self.honest = msgspec.to_builtins(new.position())

    def go_on(self, **lies):
        """How many frames of the log the other end gets, that says so."""
        here, there = memory_pair()
        there.write(msgspec.msgpack.encode({**self.honest, **lies}))
        self.pipe.go_on(here)
        self.pipe.close(0)
        there.read()  # the position of this end
        return len([*iter(there.read, None)])


FAR = 1 << 60


@pytest.mark.parametrize(
    ("says", "frames"),
    [({}, 4), ({"start": 2}, 2), ({"start": FAR}, 0), ({"latest": FAR}, 4), ({"decided": FAR}, 4)],
    ids=str,
)
def test_a_neighbour_gets_the_log_and_less_if_it_claims_to_be_further_which_costs_nothing(
    says, frames, tmp_path
):
    """What it does not ask for it lacks; the run names who does not go on (run/watch.py)."""
    assert Cut(tmp_path).go_on(**says) == frames


@pytest.mark.parametrize(
    "lies",
    [{"start": -1}, {"start": "none"}, {"start": None}, {"received": 7}, {"received": [["a"]]}],
    ids=str,
)
def test_a_position_that_cannot_be_is_its_sender_s_fault(lies, tmp_path):
    with pytest.raises(BreachError):
        Cut(tmp_path).go_on(**lies)


def test_a_position_without_end_is_not_read(tmp_path):
    with pytest.raises(WireError, match="did not say where it stands"):
        Cut(tmp_path).go_on(padding="x" * (1 << 20))


def test_who_lied_is_convicted_and_not_who_found_it():
    said, order = [], SimpleNamespace(host={"routes": []})
    peer = SimpleNamespace(order=order, _links={}, say=said.append)
    Peer.fail(peer, BreachError("it stands at step -1"), 2)
    assert (said[0].convicts, said[0].accuses) == ([2], [])


# The log of another run


@pytest.mark.parametrize("change", [{"run__seed": 7}, {"optim__lr": 0.5}], ids=str)
def test_a_process_of_another_run_is_refused_before_a_frame_is_sent_again(
    change, make_settings, corpus, tmp_path
):
    """As at the start, but for what changes from step to step; and so is one of another epoch."""

    def contract(epoch=3, **changes):
        worker = Worker(make_settings(**changes), 0, corpus, tmp_path / "run")
        return worker.contract(0, epoch, at_start=False)

    mine = contract()
    for theirs in (contract(**change), contract(epoch=2), {**mine, "corpus": "another"}):
        here, there = memory_pair()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(handshake, there, theirs, {}, PATIENCE)
            with pytest.raises(WireError, match="match"):
                handshake(here, mine, mine, PATIENCE)
