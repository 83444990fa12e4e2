"""A run of machines that accept nothing from outside: host and peers meet at a relay."""

import json

import pytest

from thinwire.wire import Door


@pytest.mark.slow  # tests/wire has doors, routes and splices over sockets
def test_a_host_and_peers_that_only_dial_out_train_by_a_relay(machines):
    machines.config(pipeline__stages=2, train__steps=4)
    with Door("127.0.0.1", 0) as relay:
        relay.admit_any("open-sesame")
        # Nothing listens at the address in the invite, as behind a router that forwards no port.
        host = machines.host("--address", "127.0.0.1:1", "--relay", f"{relay.address}/open-sesame")
        peers = [machines.join(name, "--no-listen") for name in ("ana", "ben")]
        assert host.wait() == 0, host.text()
        for peer in peers:
            assert peer.wait() == 0, peer.text()
            assert "the run is complete: 4 steps" in peer.text()
        (traffic,) = relay.traffic().values()
    summary = json.loads((machines.run_folder / "summary.json").read_text())
    assert summary["steps"] == 4
    assert traffic.relayed_bytes > summary["bytes_sent"]["total"] > 0
