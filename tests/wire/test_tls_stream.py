"""Streams over TLS: both ends proven by their keys, losses noticed, strangers few."""

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from wiring import HOST, HOURLY, MAX_MESSAGE, MAX_PAYLOAD, PEER, Recorder, writing

from proxy import Proxy
from thinwire import wire
from thinwire.errors import AdmissionError, BreachError, WireError
from waiting import PATIENCE, wait_until

HASTY = 3.0

# Another process: dials (or listens, and is dialed), echoes every frame, and never closes.
OTHER = """
    import json, sys, threading
    from thinwire.wire import *
    order = json.loads(sys.stdin.readline())
    identity = Identity(**order["identity"])
    stream.SILENCE_S = order["silence"]
    if "address" in order:
        pipe = dial(order["address"], "peer", identity, order["whom"], 30, 1 << 25)
    else:
        listener = Listener(identity, "127.0.0.1", 0, 1 << 25)
        print(listener.address, flush=True)
        pipe = listener.accept("coordinator", 30)
    link = Link(pipe, Meter(), "echo", 1 << 24)
    link.start(lambda frame: link.send(frame), lambda error: None)
    order["wait"] and threading.Event().wait()
"""


def call(address, name="peer", who=PEER, timeout=PATIENCE, whom=HOST.fingerprint, **more):
    return wire.dial(address, name, who, whom, timeout, MAX_MESSAGE, **more)


def refusal(address, *others, **named):
    """Why a single attempt to open a stream fails."""
    with pytest.raises(WireError) as failure:
        call(address, *others, **named, tries_again=False)
    return failure.value


@contextlib.contextmanager
def awaited(listener, name="peer", dialer=""):
    """A stream of this name is expected, and must come in the end."""
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, name, PATIENCE, dialer)
        wait_until(lambda: name in listener._expected)
        yield accepted
        accepted.result(PATIENCE)


@pytest.fixture
def spawn(monkeypatch):
    """Start the other process, and join it; it is killed at the end."""
    held = contextlib.ExitStack()

    def spawn(we, silence, wait=True):
        monkeypatch.setattr(wire.stream, "SILENCE_S", silence)
        order = {
            "identity": {"name": "peer", "key_pem": PEER.key_pem}, "silence": silence, "wait": wait,
            "whom": HOST.fingerprint,
        }  # fmt: skip
        if we == "listen":
            listener = wire.Listener(HOST, "127.0.0.1", 0, MAX_MESSAGE)
            held.callback(listener.close)
            order["address"] = listener.address
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(OTHER)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        held.callback(process.communicate)
        held.callback(process.kill)
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        if we == "listen":
            return process, listener.accept("peer", PATIENCE)
        address = process.stdout.readline().strip()
        return process, call(address, "coordinator", HOST, PATIENCE, PEER.fingerprint)

    yield spawn
    held.close()


def start(pipe):
    heard = Recorder()
    link = wire.Link(pipe, wire.Meter(), "coordinator-peer", MAX_PAYLOAD)
    link.start(heard.on_frame, heard.on_broken, heard.on_end)
    return link, heard


@pytest.mark.parametrize(("we", "stop_with", "silence"), [
    ("listen", signal.SIGKILL, HOURLY),
    ("dial", signal.SIGSTOP, HASTY),
    ("listen", signal.SIGSTOP, HASTY),
], ids=["killed", "silent listener", "silent dialer"])  # fmt: skip
def test_a_lost_process_is_noticed(spawn, we, stop_with, silence):
    """A killed process is noticed at once; a stopped one says no more that it is alive."""
    process, pipe = spawn(we, silence)
    link, heard = start(pipe)
    link.send(wire.Frame(wire.FrameKind.FORWARD, step=5, payload=bytes(1 << 20)))
    heard.wait(lambda: heard.frames)
    if stop_with is signal.SIGSTOP and we == "listen":
        time.sleep(3.5)  # idle, and alive
    assert heard.frames[0].step == 5 and heard.errors == []
    process.send_signal(stop_with)
    heard.wait(lambda: heard.errors)
    assert "link coordinator-peer is broken: the other end is gone" in str(heard.errors[0])
    link.close()
    assert len(heard.errors) == 1


@pytest.mark.parametrize("we", ["listen", "dial"])
def test_a_process_that_forgets_to_close_still_exits(spawn, we):
    process, pipe = spawn(we, HOURLY, wait=False)
    assert process.wait(PATIENCE) == 0
    pipe.close()


def test_an_end_that_does_not_read_is_alive_all_the_same(listener, monkeypatch):
    """A stage that is busy takes nothing for a while: the other end must not give it up."""
    monkeypatch.setattr(wire.stream, "SILENCE_S", HASTY)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, "peer", PATIENCE)
        (link, heard) = start(call(listener.address))
        for _ in range(20):
            link.send(wire.Frame(wire.FrameKind.FORWARD, payload=bytes(1 << 20)))
        time.sleep(3.5)
        assert heard.errors == []
        late, got = start(accepted.result())
        got.wait(lambda: len(got.frames) == 20)
    link.close()
    late.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_the_round_trip_is_what_the_system_measures(listener):
    """Of this connection, for as long as there is one; a lasting pipe has that of its own."""
    with awaited(listener) as accepted:
        ours, theirs = call(listener.address), accepted.result(PATIENCE)
        lasting = [wire.LastingPipe(end, None, PATIENCE) for end in (ours, theirs)]
        lasting[0].write(b"a message")
        assert lasting[1].read() == b"a message"
    assert 0 < ours.round_trip() < PATIENCE
    assert 0 < lasting[0].round_trip() < PATIENCE
    for pipe in lasting:
        pipe.close(0)
    assert ours.round_trip() == lasting[0].round_trip() == 0


def test_where_nobody_can_listen_and_who_can_be_dialed(listener, tmp_path):
    port = int(listener.address.rsplit(":", 1)[1])
    with pytest.raises(WireError, match=f"port {port} of 127.0.0.1: Address already in use"):
        wire.Listener(HOST, "127.0.0.1", port, MAX_MESSAGE)
    with pytest.raises(WireError, match=r"cannot listen on port 0 of 192\.0\.2\.1: .*link\.listen"):
        wire.Listener(HOST, "192.0.2.1", 0, MAX_MESSAGE)
    listener.close()
    assert "Connection refused" in str(refusal(listener.address))
    wire.Listener(HOST, "127.0.0.1", port, MAX_MESSAGE).close()  # it is free again
    with socket.socket(socket.AF_UNIX) as file:
        # A host tells a peer where to dial: it must not learn which files are there.
        file.bind(str(tmp_path / "s"))
        file.listen()
        file.settimeout(0.1)
        refusal(f"unix:{tmp_path}/s")
        with pytest.raises(TimeoutError):
            file.accept()


def test_names_that_are_expected_and_others(listener, connect):
    assert "'stranger' is not expected there" in str(refusal(listener.address, "stranger"))
    with pytest.raises(WireError, match=r"'peer' did not dial .* within 0\.05 s"):
        listener.accept("peer", 0.05)
    accepted, dialed = connect("peer")
    dialed.write(b"x" * 64)
    assert accepted.read() == b"x" * 64
    assert "'peer' is not expected there" in str(refusal(listener.address)), "a second time"
    with pytest.raises(WireError, match="empty message"):
        dialed.write(b"")


def test_a_refusal_outweighs_the_silence_of_later_attempts(listener):
    """A dial cut short by its own deadline said "no answer" though it had been answered before."""
    path = Proxy(listener.address)
    with ThreadPoolExecutor(1) as pool:
        dialing = pool.submit(call, path.address, timeout=5)
        wait_until(lambda: path.connections > 1)
        path.fall_silent()
        with pytest.raises(WireError, match="'peer' is not expected there"):
            dialing.result()
    path.close()


def test_both_ends_prove_their_keys(listener):
    other = wire.Identity.create("peer", HOST.public)
    with awaited(listener, dialer=PEER.fingerprint) as accepted:
        refused = refusal(listener.address, who=other)
        assert "'peer' is expected from " in str(refused) and type(refused) is WireError
        refused = refusal(listener.address, whom=other.fingerprint)
        assert "it has another key" in str(refused) and type(refused) is BreachError
        assert not accepted.done()
        call(listener.address).write(b"let in")
        assert accepted.result().read() == b"let in"


def test_who_is_not_on_the_list_is_refused_for_good():
    members = {PEER.fingerprint: "ada"}
    listener = wire.Listener(HOST, "127.0.0.1", 0, MAX_MESSAGE, who=members.get)
    with awaited(listener, "lobby", "ada"):
        with pytest.raises(AdmissionError, match="is not welcome there; its host removed this"):
            call(listener.address, "lobby", wire.Identity.create("ada"))
        call(listener.address, "lobby")
    members.clear()
    with pytest.raises(AdmissionError):
        call(listener.address, "lobby")
    listener.close()


def greet(address):
    """A stranger that speaks TLS, and how it reads and writes messages."""
    host, port = address.split(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    talk = context.wrap_socket(socket.create_connection((host, int(port)), PATIENCE))

    def read():
        size = int.from_bytes(talk.recv(4), "little")
        return talk.recv(size) if size else b""

    return talk, read, lambda said: talk.sendall(len(said).to_bytes(4, "little") + said)


@pytest.mark.parametrize("thief", ["no key", "another nonce", "another listener", "another name",
                                   "another's signature"])  # fmt: skip
def test_a_signature_counts_at_one_listener_for_one_name_once(listener, thief):
    """Nobody passes on what a member has signed, neither another member nor who overheard it."""
    talk, read, write = greet(listener.address)
    assert talk.version() == "TLSv1.3"
    nonce, own = read().decode(), HOST.fingerprint
    other, name = PEER.fingerprint, "peer"
    signed = {
        "no key": lambda: "AAAA ====",
        "another nonce": lambda: PEER.prove(f"thinwire stream {'0' * 32} {own} {name}"),
        "another listener": lambda: PEER.prove(f"thinwire stream {nonce} {other} {name}"),
        "another name": lambda: PEER.prove(f"thinwire stream {nonce} {own} another"),
        "another's signature": lambda: (
            f"{PEER.public} {HOST.prove(f'thinwire stream {nonce} {own} {name}').split(' ')[1]}"
        ),
    }[thief]()
    with awaited(listener) as accepted:
        write(f"{signed}\n{name}".encode())
        with contextlib.suppress(OSError):
            assert read() == b""
        assert not accepted.done()
        call(listener.address)


def test_the_right_signature_of_a_stranger_written_by_hand_counts(listener):
    talk, read, write = greet(listener.address)
    proof = PEER.prove(f"thinwire stream {read().decode()} {HOST.fingerprint} peer")
    with awaited(listener, dialer=PEER.fingerprint) as accepted:
        write(f"{proof}\npeer".encode())
        assert read() == b"ok"
        write(b"hello")
        assert accepted.result().read() == b"hello"
        write(bytes(1))  # and a message that is longer than agreed
        talk.sendall((MAX_MESSAGE + 1).to_bytes(4, "little"))
        assert accepted.result().read() == bytes(1)
        with pytest.raises(BreachError, match="at most"):
            accepted.result().read()
    talk.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /proc")
def test_strangers_hold_few_descriptors_and_not_for_long(listener, monkeypatch):
    """Idle connections stayed for two minutes, each a descriptor: 1,100 stopped checkpoints."""
    wire.raise_descriptor_limit()
    monkeypatch.setattr(wire.stream, "HANDSHAKE_S", HOURLY)
    monkeypatch.setattr(wire.stream, "MOST_STRANGERS", 40)
    place = "127.0.0.1", int(listener.address.split(":")[1])
    before, poll = len(os.listdir("/proc/self/fd")), select.poll()
    with contextlib.ExitStack() as held:
        for _ in range(300):
            poll.register(held.enter_context(socket.create_connection(place)), select.POLLIN)
        wait_until(lambda: len(poll.poll(0)) == 300 - 40)  # they are hung up on
        wait_until(lambda: len(os.listdir("/proc/self/fd")) - before - 300 <= 40 + 5)
    wait_until(lambda: not listener._streams)
    monkeypatch.setattr(wire.stream, "HANDSHAKE_S", 1.0)
    strangers = [socket.create_connection(place) for _ in range(60)]
    with awaited(listener) as accepted:  # who belongs to the run comes in once they are gone
        dialed = call(listener.address)
        dialed.write(b"in")
        assert accepted.result().read() == b"in"
    for stranger in strangers:
        stranger.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1000) == b""
        stranger.close()
    listener.close()
    dialed.close()


def test_a_stranger_that_drips_has_no_more_time_than_others(listener, monkeypatch):
    monkeypatch.setattr(wire.stream, "HANDSHAKE_S", 3.0)  # enough for TLS
    talk, read, _ = greet(listener.address)
    read()
    began = time.monotonic()
    with contextlib.suppress(OSError):
        talk.sendall((4000).to_bytes(4, "little"))
        while time.monotonic() < began + PATIENCE:
            talk.sendall(b"x")
            time.sleep(0.05)
    assert time.monotonic() - began < PATIENCE


def test_a_writer_is_held_back_when_nobody_reads(connect):
    accepted, dialed = connect("peer")
    writer, written = writing(dialed, itertools.repeat(bytes(1 << 20)))
    wait_until(lambda: written)
    time.sleep(0.5)  # unhindered, it would write hundreds in this time
    assert len(written) < 50
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(dialed.read)
        accepted.close()
        assert ended.result(PATIENCE) is None
    writer.join(PATIENCE)
    assert not writer.is_alive(), "it was refused"


def test_closing_the_listener_ends_waits_and_breaks_what_is_open(connect, listener):
    accepted, dialed = connect("peer")
    link, heard = start(dialed)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listener.accept, "other", None)
        wait_until(lambda: "other" in listener._expected)
        listener.close()
        with pytest.raises(WireError, match="closed before 'other' dialed"):
            waiting.result(PATIENCE)
    heard.wait(lambda: heard.errors)
    with pytest.raises(WireError):
        accepted.read()
    link.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="TCP_INFO is read on Linux only")
def test_below_the_meter_a_frame_costs_4_bytes_and_22_for_each_record(connect, monkeypatch):
    """What docs/wire.md says: a length, and for each 16 KiB what TLS adds. The kernel counts."""
    monkeypatch.setattr(wire.stream, "SILENCE_S", HOURLY)  # nobody says that it is alive
    accepted, dialed = connect("peer")
    (near, heard), (far, got) = start(dialed), start(accepted)

    def sent_by_kernel():
        info = dialed._tls.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        sent, again = (int.from_bytes(info[at : at + 8], sys.byteorder) for at in (200, 208))
        return sent - again

    for payload, records in ((1024, 1), (1 << 20, 65)):
        kernel, metered, count = sent_by_kernel(), near.meter.sent_bytes(), len(got.frames)
        for _ in range(10):
            near.send(wire.Frame(wire.FrameKind.FORWARD, payload=bytes(payload)))
        got.wait(lambda count=count: len(got.frames) == count + 10)
        below = sent_by_kernel() - kernel - (near.meter.sent_bytes() - metered)
        assert below == 10 * (4 + 22 * records)
    near.close()
    far.close()
    assert heard.errors == []


def test_identities_hide_their_keys_and_damaged_ones_are_named():
    assert "PRIVATE" in PEER.key_pem and "PRIVATE" not in repr(PEER)
    assert len(PEER.fingerprint) == 64 and PEER.fingerprint != HOST.fingerprint
    assert wire.Identity("peer", PEER.key_pem).fingerprint == PEER.fingerprint
    with pytest.raises(WireError, match="the key of 'peer' is damaged"):
        wire.Identity("peer", PEER.key_pem[:60]).public  # noqa: B018
    # Both ends make the same token, and nobody else does.
    assert PEER.door_token == HOST.token_with("peer", PEER.public)
    assert PEER.door_token != wire.Identity.create("peer", HOST.public).door_token
