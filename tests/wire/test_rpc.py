import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from wiring import HOURLY, MAX_MESSAGE, MAX_PAYLOAD, Recorder

from thinwire.errors import WireError
from thinwire.wire import (
    Frame,
    FrameKind,
    Keepalive,
    Link,
    Listener,
    Meter,
    dial,
    raise_descriptor_limit,
    rpc,
)
from waiting import PATIENCE, wait_until

HASTY = Keepalive(every_s=0.1, timeout_s=0.4)

# Another process: dials (or listens, and is dialed), echoes every frame, and never closes.
PEER = """
    import json, sys, threading
    from thinwire.wire import *
    order = json.loads(sys.stdin.readline())
    identity = Identity.from_plain(order["identity"])
    keepalive = Keepalive(*order["keepalive"])
    if "address" in order:
        pipe = dial(order["address"], "peer", identity, "coordinator", 30, 1 << 25, keepalive)
    else:
        listener = Listener(identity, "127.0.0.1", 0, 1 << 25, keepalive)
        print(listener.address, flush=True)
        pipe = listener.accept("coordinator", 30)
    link = Link(pipe, Meter(), None, "echo", 1 << 24)
    link.start(lambda frame: link.send(frame), lambda error: None)
    order["wait"] and threading.Event().wait()
"""


@pytest.fixture
def spawn() -> Iterator:
    """Start the other process with its orders on stdin; it is killed at the end."""
    processes = []

    def spawn(order: dict) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PEER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        processes.append(process)
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        return process

    yield spawn
    for process in processes:
        process.kill()
        process.communicate()


def start(pipe, name="coordinator-peer") -> tuple[Link, Recorder]:
    heard = Recorder()
    link = Link(pipe, Meter(), None, name, MAX_PAYLOAD)
    link.start(heard.on_frame, heard.on_broken, heard.on_end)
    return link, heard


def order(authority, keepalive: Keepalive, **more) -> dict:
    return {
        "identity": authority.issue("peer").to_plain(),
        "keepalive": [keepalive.every_s, keepalive.timeout_s],
        "wait": True,
        **more,
    }


@pytest.mark.parametrize("we", ["listen", "dial"])
@pytest.mark.parametrize(
    ("stop_with", "keepalive"),
    [(signal.SIGKILL, HOURLY), (signal.SIGSTOP, HASTY)],
    ids=["killed", "silent"],
)
def test_a_lost_process_is_noticed(authority, spawn, we, stop_with, keepalive):
    # A killed process must be noticed without any ping; a stopped one only pings reveal.
    identity = authority.issue("coordinator")
    listener = None
    if we == "listen":
        listener = Listener(identity, "127.0.0.1", 0, MAX_MESSAGE, keepalive)
        process = spawn(order(authority, keepalive, address=listener.address))
        pipe = listener.accept("peer", PATIENCE)
    else:
        process = spawn(order(authority, keepalive))
        address = process.stdout.readline().strip()
        pipe = dial(address, "coordinator", identity, "peer", PATIENCE, MAX_MESSAGE, keepalive)
    link, heard = start(pipe)
    link.send(Frame(FrameKind.FORWARD, step=5, payload=bytes(1 << 20)))
    heard.wait(lambda: heard.frames)
    assert heard.frames[0].step == 5 and heard.errors == []

    process.send_signal(stop_with)
    heard.wait(lambda: heard.errors)
    assert "link coordinator-peer is broken: the other end is gone" in str(heard.errors[0])
    link.close()
    if listener is not None:
        listener.close()
    assert len(heard.errors) == 1


@pytest.mark.parametrize("we", ["listen", "dial"])
def test_a_process_that_forgets_to_close_still_exits(authority, spawn, we):
    identity = authority.issue("coordinator")
    if we == "listen":
        listener = Listener(identity, "127.0.0.1", 0, MAX_MESSAGE)
        process = spawn(order(authority, HOURLY, address=listener.address, wait=False))
        listener.accept("peer", PATIENCE)
        assert process.wait(PATIENCE) == 0
        listener.close()
    else:
        process = spawn(order(authority, HOURLY, wait=False))
        address = process.stdout.readline().strip()
        pipe = dial(address, "coordinator", identity, "peer", PATIENCE, MAX_MESSAGE)
        assert process.wait(PATIENCE) == 0
        pipe.close()


def test_frequent_pings_on_an_idle_link_are_tolerated(authority):
    # Only the dialer pings: whoever hears the other's pings keeps quiet, and it is the
    # listener that would hang up.
    often = Keepalive(every_s=0.05, timeout_s=PATIENCE)
    listener = Listener(authority.issue("coordinator"), "127.0.0.1", 0, MAX_MESSAGE, HOURLY)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, "peer", PATIENCE)
        identity = authority.issue("peer")
        dialed = dial(
            listener.address, "peer", identity, "coordinator", PATIENCE, MAX_MESSAGE, often
        )
        pipe = accepted.result()
    (here, heard_here), (there, heard_there) = start(pipe), start(dialed)
    time.sleep(5.5)  # gRPC pings once a second at most, and by default hangs up at the fourth
    here.send(Frame(FrameKind.FORWARD))
    there.send(Frame(FrameKind.BACKWARD))
    heard_here.wait(lambda: heard_here.frames or heard_here.errors)
    heard_there.wait(lambda: heard_there.frames or heard_there.errors)
    assert heard_here.errors == heard_there.errors == []
    here.close()
    there.close()
    listener.close()


def test_a_port_in_use_is_an_error_that_says_what_to_do(authority, listener):
    port = int(listener.address.rsplit(":", 1)[1])
    wanted = f"port {port} on 127.0.0.1 is in use by another process: set link.port to another"
    with pytest.raises(WireError, match=wanted):
        Listener(authority.issue("second"), "127.0.0.1", port, MAX_MESSAGE)


def test_a_port_is_free_again_after_closing(authority):
    first = Listener(authority.issue("coordinator"), "127.0.0.1", 0, MAX_MESSAGE)
    first.close()
    port = int(first.address.rsplit(":", 1)[1])
    second = Listener(authority.issue("coordinator"), "127.0.0.1", port, MAX_MESSAGE)
    assert second.address == first.address
    second.close()


def test_an_address_of_another_machine_cannot_be_listened_on(authority):
    with pytest.raises(WireError, match=r"cannot listen on port 0 of 192\.0\.2\.1: .*link\.listen"):
        Listener(authority.issue("coordinator"), "192.0.2.1", 0, MAX_MESSAGE)


def test_dialing_where_nothing_listens_is_an_error(authority, listener):
    listener.close()
    with pytest.raises(WireError, match="nothing listens there; is that process running"):
        dial(listener.address, "peer", authority.issue("peer"), "coordinator", 3.0, MAX_MESSAGE)


def test_an_address_never_names_a_socket_among_the_files_of_this_machine(authority, tmp_path):
    """A host tells a peer where to dial: it must not learn which files are there."""
    with socket.socket(socket.AF_UNIX) as file:
        file.bind(str(tmp_path / "s"))
        file.listen()
        file.settimeout(0.1)
        with pytest.raises(WireError):
            dial(f"unix:{tmp_path}/s", "x", authority.issue("x"), "coordinator", 0.5, MAX_MESSAGE)
        with pytest.raises(TimeoutError):
            file.accept()


def test_a_proxy_of_the_environment_is_not_used(connect, monkeypatch):
    for variable in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for variable in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    accepted, dialed = connect("peer")
    dialed.write(b"straight")
    assert accepted.read() == b"straight"


def test_an_empty_message_is_refused(connect):
    _, dialed = connect("peer")
    with pytest.raises(WireError, match="empty message"):
        dialed.write(b"")


def test_an_unexpected_name_is_refused(authority, listener):
    with pytest.raises(WireError, match="'stranger' is not expected there"):
        dial(listener.address, "stranger", authority.issue("peer"), "coordinator", 3.0, MAX_MESSAGE)


def test_a_second_dial_by_the_same_name_is_refused(authority, listener, connect):
    connect("peer")
    with pytest.raises(WireError, match="'peer' is not expected there"):
        dial(listener.address, "peer", authority.issue("peer"), "coordinator", 3.0, MAX_MESSAGE)


def test_a_refusal_outweighs_the_silence_of_later_attempts(authority, listener):
    """A dial cut short by its own deadline said "no answer" though it had been answered before."""
    front = socket.create_server(("127.0.0.1", 0))
    held = []

    def serve() -> None:
        inner, port = listener.address.split(":")
        caller, _ = front.accept()
        behind = socket.create_connection((inner, int(port)))
        held.extend((caller, behind))
        for source, target in ((caller, behind), (behind, caller)):
            threading.Thread(target=forward, args=(source, target), daemon=True).start()
        held.append(front.accept()[0])  # the second attempt, never answered

    def forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed under us when the test ends
            while data := source.recv(1 << 16):
                target.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    address = "{}:{}".format(*front.getsockname())
    with pytest.raises(WireError, match="'peer' is not expected there"):
        dial(address, "peer", authority.issue("peer"), "coordinator", 6.0, MAX_MESSAGE)
    assert len(held) == 3, "the second attempt was made"
    for connection in (front, *held):
        connection.close()


def test_peers_are_told_apart_by_name_and_may_dial_before_they_are_expected(authority, listener):
    identity = authority.issue("peer")
    with ThreadPoolExecutor(2) as pool:
        dials = {
            name: pool.submit(
                dial, listener.address, name, identity, "coordinator", PATIENCE, MAX_MESSAGE
            )
            for name in ("ärger", "bliss")
        }
        accepted = {name: listener.accept(name, PATIENCE) for name in ("bliss", "ärger")}
        dialed = {name: future.result(PATIENCE) for name, future in dials.items()}
    for name, pipe in dialed.items():
        pipe.write(name.encode())
        assert accepted[name].read() == name.encode()
    for pipe in [*accepted.values(), *dialed.values()]:
        pipe.close()


def test_accept_gives_up_and_can_be_asked_again(listener, connect):
    with pytest.raises(WireError, match=r"'peer' did not dial .* within 0\.05 s"):
        listener.accept("peer", 0.05)
    accepted, dialed = connect("peer")
    dialed.write(b"x" * 64)
    assert accepted.read() == b"x" * 64


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /proc")
def test_strangers_hold_few_descriptors_and_not_for_long(authority, monkeypatch):
    """Idle connections stayed for two minutes, each a descriptor: 1,100 stopped checkpoints."""
    raise_descriptor_limit()
    monkeypatch.setattr(rpc, "HANDSHAKE_S", 2.0)
    monkeypatch.setattr(rpc, "MOST_CONNECTIONS", 40)
    listener = Listener(authority.issue("coordinator"), "127.0.0.1", 0, MAX_MESSAGE)
    host, port = listener.address.split(":")

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    strangers = [socket.create_connection((host, int(port))) for _ in range(300)]
    time.sleep(0.5)
    assert open_files() - before - 300 <= 40 + 5
    with ThreadPoolExecutor(1) as pool:  # who belongs to the run comes in as soon as they are gone
        accepted = pool.submit(listener.accept, "peer", PATIENCE)
        identity = authority.issue("peer")
        dialed = dial(listener.address, "peer", identity, "coordinator", PATIENCE, MAX_MESSAGE)
        dialed.write(b"in")
        assert accepted.result().read() == b"in"
    for stranger in strangers:
        stranger.settimeout(PATIENCE)
        try:
            while stranger.recv(1000):  # gRPC may greet before it hangs up
                pass
        except ConnectionError:
            pass
        stranger.close()
    listener.close()
    dialed.close()


def test_a_message_over_the_limit_breaks_the_stream(connect):
    accepted, dialed = connect("peer")
    accepted.write(bytes(MAX_MESSAGE))
    assert len(dialed.read()) == MAX_MESSAGE
    dialed.write(bytes(MAX_MESSAGE + 1))
    with pytest.raises(WireError, match="the other end is gone"):
        accepted.read()
    with pytest.raises(WireError, match="RESOURCE_EXHAUSTED"):
        dialed.read()


def test_a_writer_is_held_back_when_nobody_reads(connect):
    accepted, dialed = connect("peer")
    written = []
    refused = threading.Event()

    def write() -> None:
        try:
            while True:
                dialed.write(bytes(1 << 20))
                written.append(1)
        except WireError:
            refused.set()

    threading.Thread(target=write, daemon=True).start()
    wait_until(lambda: written)
    time.sleep(0.5)  # unhindered, it would write hundreds in this time
    assert len(written) < 50
    accepted.close()
    assert dialed.read() is None
    assert refused.wait(PATIENCE)


def test_closing_pipe_and_listener_at_once_loses_nothing(authority):
    listener = Listener(authority.issue("coordinator"), "127.0.0.1", 0, MAX_MESSAGE)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, "peer", PATIENCE)
        identity = authority.issue("peer")
        dialed = dial(listener.address, "peer", identity, "coordinator", PATIENCE, MAX_MESSAGE)
        received = pool.submit(lambda: list(iter(dialed.read, None)))
        for number in range(30):
            accepted.result().write(bytes([number]) * (1 << 20))
        accepted.result().close()
        listener.close()
        assert [message[0] for message in received.result(PATIENCE)] == list(range(30))
    dialed.close()


@pytest.mark.parametrize("side", [0, 1], ids=["accepted", "dialed"])
def test_closing_without_a_limit_waits_for_a_late_reader(connect, side):
    ends = connect("peer")
    closer, reader = ends[side], ends[1 - side]

    def send_and_close() -> None:
        for number in range(32):
            closer.write(bytes([number]) * (1 << 20))
        closer.close(None)

    closing = threading.Thread(target=send_and_close, daemon=True)
    closing.start()
    closing.join(6)  # nobody reads, for longer than the usual grace; nothing may be lost by that
    assert [message[0] for message in iter(reader.read, None)] == list(range(32))
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_a_dialer_with_the_certificate_of_another_is_refused(authority, listener):
    right, wrong = authority.issue("stage-1"), authority.issue("stage-2")
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, "cut-0", PATIENCE, "stage-1")
        with pytest.raises(WireError, match="'cut-0' is expected from 'stage-1', not from"):
            dial(listener.address, "cut-0", wrong, "coordinator", 3.0, MAX_MESSAGE)
        assert not accepted.done()
        dialed = dial(listener.address, "cut-0", right, "coordinator", PATIENCE, MAX_MESSAGE)
        dialed.write(b"let in")
        assert accepted.result().read() == b"let in"
    listener.close()
    dialed.close()


def test_closing_the_listener_ends_a_wait_without_limit(listener):
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, "peer", None)
        wait_until(lambda: "peer" in listener._expected)
        listener.close()
        with pytest.raises(WireError, match="closed before 'peer' dialed"):
            accepted.result(PATIENCE)


def test_closing_the_listener_breaks_what_is_still_open(connect, listener):
    accepted, dialed = connect("peer")
    link, heard = start(dialed)
    listener.close()
    heard.wait(lambda: heard.errors)
    with pytest.raises(WireError):
        accepted.read()
    link.close()


def test_no_threads_are_left_behind(authority, listener, connect):
    def ours() -> set[str]:
        return {t.name for t in threading.enumerate() if t is not threading.main_thread()}

    before = ours()
    accepted, dialed = connect("peer")
    (here, _), (there, heard) = start(accepted), start(dialed)
    with pytest.raises(WireError):
        dial(listener.address, "x", authority.issue("peer"), "coordinator", 0.3, MAX_MESSAGE)
    here.close()
    heard.wait(lambda: heard.ends)
    there.close()
    wait_until(lambda: not ours() - before)


LISTENING = """
    import json, sys
    from thinwire.wire import Identity, Listener, rpc
    listener = Listener(Identity.from_plain(json.loads(sys.stdin.readline())), "127.0.0.1", 0, 1000)
    print(listener.address, flush=True)
    sys.stdin.read()
"""

GREETING = """
    import contextlib, socket, ssl, sys, threading
    host, port = sys.argv[1].rsplit(":", 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])

    def greet():
        for _ in range(60):
            with contextlib.suppress(OSError):
                context.wrap_socket(socket.create_connection((host, int(port)), 10)).close()

    threads = [threading.Thread(target=greet) for _ in range(4)]
    [thread.start() for thread in threads]
"""


def test_many_handshakes_at_once_do_not_end_the_process(authority):
    """gRPC reads freed memory where it is told at every handshake to show something new."""
    command = [sys.executable, "-c"]
    listening = subprocess.Popen(
        [*command, textwrap.dedent(LISTENING)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    listening.stdin.write(json.dumps(authority.issue("coordinator").to_plain()) + "\n")
    listening.stdin.flush()
    address = listening.stdout.readline().strip()
    greeting = [subprocess.Popen([*command, textwrap.dedent(GREETING), address]) for _ in range(4)]
    for process in greeting:
        assert process.wait(PATIENCE) == 0
    assert listening.poll() is None, f"it ended with {listening.returncode}"
    listening.communicate()
    assert listening.returncode == 0
