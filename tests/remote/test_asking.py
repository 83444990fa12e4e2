"""Asking a run of several machines how it stands, and having peers leave it: real processes."""

import json
import re
import time

import pytest
from machines import Machines, machines  # noqa: F401


def status(machines: Machines, home: str, *where: object) -> dict[str, object]:  # noqa: F811
    """What `thinwire status --json` prints on a machine."""
    asked = machines.run(home, "status", *where, "--json")
    assert asked.wait() == 0, asked.text()
    return dict(json.loads(asked.text()))


@pytest.mark.slow
def test_a_run_is_asked_on_its_host_and_on_a_peer_and_peers_leave(
    machines: Machines,  # noqa: F811
) -> None:
    machines.config(pipeline__stages=2, train__steps=100_000, train__checkpoint_every=0)
    host = machines.host()
    before = status(machines, "host", machines.run_folder)
    assert before["state"] == "waiting" and "2 more peers" in str(before["waiting_for"])
    ana = machines.join("ana")
    ben = machines.join("ben")
    host.wait_for(r"step +2/")
    assert "split" in host.text() and "a step takes" in host.text()

    seen = status(machines, "host", machines.run_folder)
    assert (seen["role"], seen["state"], seen["epoch"]) == ("host", "training", 1)
    assert seen["step"] > 0 and seen["loss"] > 0  # type: ignore[operator]
    peers = {peer["name"]: peer for peer in seen["peers"]}  # type: ignore[attr-defined]
    assert sorted(peer["stage"] for peer in peers.values()) == [0, 1]
    for peer in peers.values():
        assert peer["state"] not in ("", "away", "kicked") and peer["machine"]["device"].startswith(
            "cpu"
        )
        assert all(peer["machine"][key] > 0 for key in ("tflops", "mbps_up", "memory_gb"))
        assert 0 <= seen["time"] - peer["last_word"] < 60  # type: ignore[operator]
    (link,) = seen["links"]  # type: ignore[misc]
    assert link["way"] == "direct" and link["forward_bytes_per_s"] > 0  # type: ignore[index]

    own = status(machines, "ana")
    assert (own["role"], own["state"]) == ("member", "training") and own["step"] > 0  # type: ignore[operator]
    assert [peer["name"] for peer in own["peers"]] == ["ana"]  # type: ignore[attr-defined]

    left = machines.run("ana", "leave")
    assert left.wait() == 0 and "leaves the run after this step" in left.text()
    assert ana.wait() == 0, ana.text()
    host.wait_for(r"ana left after step \d+")
    waiting = _until_waiting(machines)
    assert "ana or another" in str(waiting["waiting_for"])

    kicked = machines.run("host", "kick", "ben", machines.run_folder)
    assert kicked.wait() == 0 and "ben was removed from the run" in kicked.text()
    assert ben.wait() != 0 and "the host removed this peer" in ben.text()
    assert "(ana or another)" in str(_until_waiting(machines)["waiting_for"])
    late = machines.join("cleo")
    assert late.wait() == 8 and "this invite was closed" in late.text()
    invited = machines.run("host", "invite", machines.run_folder)
    assert invited.wait() == 0, invited.text()
    (machines.invite,) = re.findall(r"tw1-\S+", invited.text())
    machines.join("cleo").wait_for("enrolled as cleo")
    states = {p["name"]: p["state"] for p in status(machines, "host", machines.run_folder)["peers"]}  # type: ignore[attr-defined]
    assert states["ben"] == "kicked" and states["ana"] == "away"
    unknown = machines.run("host", "kick", "eve", machines.run_folder)
    assert unknown.wait() == 2 and "no peer of this run is called 'eve'" in unknown.text()

    host.interrupt()
    assert host.wait() == 130, host.text()
    assert machines.run("host", "status", machines.run_folder).wait() == 9
    assert machines.run("ana", "status").wait() == 9


def _until_waiting(machines: Machines) -> dict[str, object]:  # noqa: F811
    deadline = time.monotonic() + 60
    while (found := status(machines, "host", machines.run_folder))["state"] != "waiting":
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found
