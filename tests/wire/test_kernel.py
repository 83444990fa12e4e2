import os
import socket
import sys
import threading

import pytest
from wiring import MAX_PAYLOAD, Recorder

from thinwire.wire import Frame, FrameKind, Link, Meter, raise_descriptor_limit, socket_totals

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="TCP_INFO is read on Linux only"
)


def totals_from(local: str):
    (found,) = [totals for totals in socket_totals() if totals.local == local]
    return found


def address_of(sock: socket.socket) -> str:
    return "{}:{}".format(*sock.getsockname())


def test_counts_of_a_plain_socket_are_exact():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    with client, accepted:
        sender = threading.Thread(target=client.sendall, args=(bytes(1_234_567),))
        sender.start()
        left = 1_234_567
        while left:
            left -= len(accepted.recv(left))
        sender.join()
        accepted.sendall(b"y" * 89)
        assert client.recv(100) == b"y" * 89

        there, here = totals_from(address_of(accepted)), totals_from(address_of(client))
        assert here.remote == there.local and there.remote == here.local
        assert there.bytes_received == 1_234_567
        assert here.bytes_received == 89
        assert (here.bytes_sent_once, there.bytes_sent_once) == (1_234_567, 89)
        assert here.bytes_sent == 1_234_567 + here.bytes_retransmitted
        # Only acknowledged bytes count here, and the connecting side's SYN counts as one.
        assert here.bytes_acked <= 1_234_568
        assert there.bytes_acked <= 89


def test_other_descriptors_are_passed_over_and_none_is_disturbed():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram,
    ):
        near, far = socket.socketpair()
        with near, far:
            before = sorted(os.listdir("/proc/self/fd"))
            locals_seen = {totals.local for totals in socket_totals()}
            assert sorted(os.listdir("/proc/self/fd")) == before
            assert address_of(server) not in locals_seen
            assert address_of(datagram) not in locals_seen
            near.sendall(b"alive")
            assert far.recv(5) == b"alive"


def test_elsewhere_nothing_is_read(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert socket_totals() == []


def test_the_soft_limit_of_descriptors_is_raised():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        limit = raise_descriptor_limit()
        assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert limit == (65536 if hard == resource.RLIM_INFINITY else min(hard, 65536))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        assert raise_descriptor_limit() == limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_below_the_meter_a_small_frame_costs_37_bytes(connect, listener):
    """What docs/wire.md says of a frame that goes alone: TLS, HTTP/2 and gRPC together."""
    accepted, dialed = connect("peer")
    meter, heard = Meter(), Recorder()
    near = Link(dialed, meter, None, "near", MAX_PAYLOAD)
    far = Link(accepted, Meter(), None, "far", MAX_PAYLOAD)
    near.start(heard.on_frame, heard.on_broken)
    far.start(far.send, heard.on_broken)

    def sent_by_kernel() -> int:
        (side,) = [t for t in socket_totals() if t.remote == listener.address]
        return side.bytes_sent_once

    def exchange(count: int) -> None:
        for _ in range(count):
            before = len(heard.frames)
            near.send(Frame(FrameKind.FORWARD, payload=bytes(1024)))
            heard.wait(lambda before=before: len(heard.frames) > before)

    exchange(5)  # the connection's own settings have crossed by then
    kernel, metered = sent_by_kernel(), meter.sent_bytes()
    exchange(50)
    below = sent_by_kernel() - kernel - (meter.sent_bytes() - metered)
    assert 30 <= below / 50 <= 80  # the other end's frames are acknowledged now and then, too
    near.close()
    far.close()


def test_grpc_s_sockets_are_seen_and_add_less_than_one_percent(connect, listener):
    accepted, dialed = connect("peer")
    meters, heard = (Meter(), Meter()), (Recorder(), Recorder())
    links = [
        Link(pipe, meter, None, "kernel", MAX_PAYLOAD)
        for pipe, meter in zip((accepted, dialed), meters, strict=True)
    ]
    for link, recorder in zip(links, heard, strict=True):
        link.start(recorder.on_frame, recorder.on_broken)
    for _ in range(8):
        for link in links:
            link.send(Frame(FrameKind.FORWARD, payload=bytes(1 << 20)))
    for recorder in heard:
        recorder.wait(lambda recorder=recorder: len(recorder.frames) == 8)

    (server_side,) = [t for t in socket_totals() if t.local == listener.address]
    (client_side,) = [t for t in socket_totals() if t.remote == listener.address]
    for side, meter in ((server_side, meters[0]), (client_side, meters[1])):
        assert meter.sent_bytes() == 8 * (64 + (1 << 20))
        assert meter.sent_bytes() <= side.bytes_sent_once < 1.01 * meter.sent_bytes()
        assert meter.received_bytes() <= side.bytes_received < 1.01 * meter.received_bytes()
    for link in links:
        link.close()
