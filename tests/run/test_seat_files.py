"""A peer that takes a seat gets the state of its stage, exactly, and next to nothing else."""

import io
import itertools
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from settings_values import EXACT, narrow
from thinwire.background import on_daemon_thread
from thinwire.engine.checkpoint import MANIFEST, Checkpoint, partial_folder, sealed
from thinwire.engine.state import most_shard_bytes
from thinwire.errors import CheckpointError, WireError
from thinwire.report import PlainDisplay
from thinwire.run import protocol as msg
from thinwire.run import transfer as tr
from thinwire.run.checkpoints import claim_folder
from thinwire.run.join import Holding, JoinedPeer, Terms
from thinwire.run.machine import Machine
from thinwire.wire import Identity, Routes, memory_pair
from waiting import PATIENCE
from whole_state import fingerprint

RUN = {**EXACT, "pipeline__stages": 3, "train__steps": 6, "train__checkpoint_every": 3}
MOST = 10**6
KINDS: dict[str, dict[str, Any]] = {
    "another split": {},
    "remembering": {"codec__forward": "topk(0.2)+ef21", "codec__backward": "topk(0.2)+ef"},
    "subspace, moving": narrow("subspace", basis_update_every=2),
}


@pytest.fixture
def trained(make_settings, run_in_threads, corpus, tmp_path):
    """A run of three stages, all of it, and its checkpoint of the middle."""

    def train(**changes):
        settings = make_settings(**{**RUN, **changes})
        outcome = run_in_threads(settings, folder=tmp_path / "host")
        folder = outcome.commit(tmp_path / "host", 3, corpus)
        return settings, outcome, Checkpoint.open(folder)

    return train


def fetch(server, stage, folder, **options):
    """The folder of a seat, and how many bytes of files were sent for it."""
    here, there = memory_pair()
    before = server.meter.snapshot()["sent"].get("PIECE", {"payload_bytes": 0})["payload_bytes"]
    serving = on_daemon_thread("host", lambda: server.serve(here, (stage,)))
    path = tr.fetch_seat(
        there, [stage], folder, most_shard_bytes(server.settings, stage), **options
    )
    serving.result(30)
    after = server.meter.snapshot()["sent"].get("PIECE", {"payload_bytes": 0})["payload_bytes"]
    return path, after - before


@pytest.mark.parametrize("kind", KINDS)
def test_seats_go_on_bit_for_bit(kind, trained, make_settings, run_in_threads, tmp_path):
    """Each gets the file of its stage; in another split just the tensors of its blocks."""
    settings, whole, checkpoint = trained(**KINDS[kind])
    if kind == "another split":
        settings = make_settings(**{**RUN, "pipeline__stages": 4})
    server, seats, total = tr.SeatServer(checkpoint, settings), [], 0
    for stage in range(settings.pipeline.stages):
        path, sent = fetch(server, stage, tmp_path / f"peer-{stage}")
        Checkpoint.open(path).verify()
        files = [shard.file for shard in Checkpoint.open(path).shards]
        seats.append(path)
        total += sent
        if kind == "remembering" or (kind == "subspace, moving" and stage == 0):
            own = checkpoint.shards[stage]
            assert files == [own.file] and sent == own.bytes, "exactly one file"
        elif kind == "subspace, moving":
            ours, theirs = (load_file(f / "stage-0.safetensors") for f in (path, checkpoint.folder))
            assert list(ours) == ["space/basis"], "of another stage just the basis"
            assert ours["space/basis"].equal(theirs["space/basis"])
    assert total < 1.2 * sum(shard.bytes for shard in checkpoint.shards), "each tensor once"

    def restore(worker):
        worker.state.restore(Checkpoint.open(seats[worker.index]))

    resumed = run_in_threads(settings, prepare_worker=restore, folder=tmp_path / "again")
    if kind == "another split":
        whole = run_in_threads(settings, resume=checkpoint.folder, folder=tmp_path / "other")
    assert resumed.losses() == whole.losses()[-3:]
    for ours, theirs in zip(resumed.workers, whole.workers, strict=True):
        assert fingerprint(ours.state) == fingerprint(theirs.state)
    server.close()
    assert not list(checkpoint.folder.parent.glob(".extracts-*"))


def test_what_is_here_is_not_sent_again_also_after_a_lost_connection(
    trained, tmp_path, monkeypatch
):
    settings, _, checkpoint = trained()
    server, folder = tr.SeatServer(checkpoint, settings), tmp_path / "peer"
    own = partial_folder(folder, 3)  # the machine that wrote this shard
    own.mkdir(parents=True)
    source = checkpoint.folder / "stage-1.safetensors"
    (own / "stage-1.safetensors").write_bytes(source.read_bytes())
    path, sent = fetch(server, 1, folder)
    assert sent == 0
    Checkpoint.open(path).verify()
    again, sent = fetch(server, 1, folder)
    assert (again, sent) == (path, 0)
    other, sent = fetch(server, 2, folder)  # it takes another seat too
    assert path.is_dir() and sent == checkpoint.shards[2].bytes
    assert [shard.file for shard in Checkpoint.open(other).shards] == ["stage-2.safetensors"]
    (other / "stage-2.safetensors").write_bytes(b"altered")
    assert fetch(server, 2, folder)[1] == checkpoint.shards[2].bytes

    monkeypatch.setattr("thinwire.run.transfer.PIECE_BYTES", 1024)
    seen, (here, there) = [], memory_pair(1)
    on_daemon_thread("host", lambda: server.serve(here, (0,)))

    def lose(done, total):
        seen.append(total)
        if done >= 5 * 1024:
            here.close()

    with pytest.raises(WireError):
        tr.fetch_seat(there, [0], folder, MOST, progress=lose)
    path, sent = fetch(server, 0, folder)
    assert set(seen) == {checkpoint.shards[0].bytes}
    assert sent <= checkpoint.shards[0].bytes - 5 * 1024
    Checkpoint.open(path).verify()


def test_a_stage_given_again_while_its_state_is_on_its_way_gets_all_of_it_once(
    trained, tmp_path, monkeypatch
):
    """The run was formed again meanwhile: what comes for the first time of asking is given up,
    for it would be written into the same files.
    """
    monkeypatch.setattr(tr, "PIECE_BYTES", 1024)
    settings, _, checkpoint = trained()
    server, started, asked = tr.SeatServer(checkpoint, settings), [], threading.Event()
    process = SimpleNamespace(begin=lambda order, *_: started.append(order), end=lambda: None)
    monkeypatch.setattr(Holding, "begin", lambda held: setattr(held, "here", process))
    goes_on, serving, sent = threading.Event(), [], itertools.count(1)

    def dial(name, timeout=0.0):
        here, there = memory_pair(1)
        if not serving:  # the first connection stalls for a while

            def write(message, write=here.write):
                if next(sent) == 4:
                    asked.set()
                    goes_on.wait(PATIENCE)
                write(message)

            here.write = write
        serving.append(on_daemon_thread("host", lambda: server.serve(here, (1,))))
        return there

    way, identity = Routes("", "127.0.0.1:1"), Identity.create("ana")
    display, machine = PlainDisplay(io.StringIO()), Machine(device="cpu")
    peer = JoinedPeer(tmp_path, way, identity, Terms(), machine, display)
    peer._dial, peer._serves_shards = dial, True
    hold = msg.Hold([1], settings.to_plain(), True, "")
    peer._on_message(msg.Envelope(hold, generation=1))
    assert asked.wait(PATIENCE)
    peer._on_message(msg.Envelope(hold, generation=2))
    while not started:
        peer._due.get(timeout=PATIENCE)()
        assert peer._holdings, "it was declined"
    (order,) = started
    goes_on.set()
    for one in serving:
        one.exception(PATIENCE)
    assert order.generation == 2
    Checkpoint.open(Path(order.resume)).verify()


def test_a_seat_is_for_the_one_who_holds_it(trained, tmp_path):
    settings, _, checkpoint = trained()
    server = tr.SeatServer(checkpoint, settings)
    here, there = memory_pair()
    serving = on_daemon_thread("host", lambda: server.serve(here, (1,)))
    talk, theirs = tr.Talk(there), checkpoint.shards[0]
    assert isinstance(talk.hear(30), tr.SeatFiles)
    talk.say(tr.Want(3, 0, theirs.sha256, theirs.bytes))
    reason = "the file of stage 0 and step 3 cannot be had: it is not of that seat"
    assert talk.hear(30) == tr.Refusal(reason)
    talk.say(tr.Refusal("nonsense"))
    with pytest.raises(WireError, match="was not asked for but sent"):
        serving.result(30)


LIES: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: m["shards"][0].update(file="../../../evil"), r"matching regex.*file`"),
    (lambda m: m["shards"][0].update(sha256="../x"), r"matching regex.*sha256`"),
    (lambda m: m["shards"].append(m["shards"][0]), "names a file twice"),
    (lambda m: m.update(step="../../evil"), r"\$\.step"),
    (lambda m: m.pop("settings"), "cannot be used"),
    (lambda m: m["settings"]["codec"].update(plugins=["evil"]),
     "names plugins, which are code: evil.*--allow-plugin"),
    (lambda m: m.update(weight_version=-1), "cannot be used"),
    (lambda m: m["shards"][0].update(bytes=MOST + 1),
     "takes at most 1,000,000 with the settings of this run"),
]  # fmt: skip


def test_a_manifest_cannot_lead_a_peer_astray(trained, tmp_path):
    _, _, checkpoint = trained()
    before = {path for path in tmp_path.rglob("*") if "peer" not in path.parts}
    for change, words in LIES:
        manifest = json.loads((checkpoint.folder / MANIFEST).read_text())
        manifest["shards"] = manifest["shards"][:1]
        change(manifest)
        here, there = memory_pair()
        talk, path = tr.Talk(here), checkpoint.folder / "stage-0.safetensors"
        talk.say(tr.SeatFiles(sealed(manifest)))
        on_daemon_thread("host", partial(tr.serve_files, talk, lambda want, path=path: path))
        with pytest.raises(CheckpointError, match=words):
            tr.fetch_seat(there, [0], tmp_path / "peer", MOST)
    assert {path for path in tmp_path.rglob("*") if "peer" not in path.parts} == before


def test_what_was_extracted_goes_with_the_run_of_a_host_that_was_killed(
    trained, make_settings, tmp_path
):
    _, _, checkpoint = trained()
    settings = make_settings(**{**RUN, "pipeline__stages": 4})
    fetch(tr.SeatServer(checkpoint, settings), 1, tmp_path / "peer")
    folder = checkpoint.folder.parent
    assert list(folder.glob(".extracts-*"))
    with claim_folder(folder.parent, checkpoint):  # as the next host does
        assert not list(folder.glob(".extracts-*"))


def test_half_of_the_disk_stays_free(trained, tmp_path, monkeypatch):
    settings, _, checkpoint = trained()
    size, server = checkpoint.shards[0].bytes, tr.SeatServer(checkpoint, settings)
    monkeypatch.setattr("thinwire.run.transfer.free_disk", lambda folder: 2 * size - 1)
    with pytest.raises(CheckpointError, match="leaves half of them free"):
        fetch(server, 0, tmp_path / "peer")
    assert not list((tmp_path / "peer").rglob("*.safetensors"))
    monkeypatch.setattr("thinwire.run.transfer.free_disk", lambda folder: 2 * size)
    fetch(server, 0, tmp_path / "peer")
    monkeypatch.setattr("thinwire.run.transfer.free_disk", lambda folder: 0)
    assert fetch(server, 0, tmp_path / "peer")[1] == 0, "what is here needs no room"
