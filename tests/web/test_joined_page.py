"""Pages of a hosted run through its host and through its peers: real processes on loopback."""

import json

from thinwire.run.alive import FILE
from thinwire.web.runs import RunView
from waiting import PROCESS_PATIENCE, wait_until

WAYS = ("direct", "relayed")  # a machine under load may answer a dial too late for the first
SECTIONS = ("state", "progress", "valid", "settings", "events")


def shown(folder):
    """What a page of this folder is sent, beside its curve."""
    view = RunView(folder)
    view.refresh()
    parts = {name: json.loads(view.sections.get(name, b"null")) for name in SECTIONS}
    return {**parts, "losses": view.curves.points()["loss"]}


def test_peers_see_the_run_as_its_host_does(machines, tmp_path):
    """Peers, links, a typical step and what happened; but neither invites nor addresses."""
    machines.config(train__steps=100_000, train__eval_every=5, train__checkpoint_every=20)
    host = machines.host("--set", "run.name=test")
    peers = {name: machines.join(name, "--folder", tmp_path / name) for name in ("ana", "ben")}

    def page(name):
        return shown(tmp_path / name) if (tmp_path / name / FILE).exists() else {}

    def is_whole(parts):
        state, events = parts.get("state") or {}, parts.get("events") or []
        links = state.get("links") or [{}]
        saved = any(event["kind"] == "save" for event in events)
        told = links[0].get("round_trip_ms") and state.get("last_checkpoint")
        return bool(told and parts["progress"] and parts["valid"] and saved)

    for name in peers:
        wait_until(lambda name=name: is_whole(page(name)), PROCESS_PATIENCE)
    member, whole = page("ana"), shown(machines.run_folder)  # the host's is the later one
    for parts in (whole, member):
        names = [peer["name"] for peer in parts["state"]["peers"]]
        assert sorted(names) == ["ana", "ben"] and len(parts["losses"]) > 0
        assert all(peer["machine"]["tflops"] > 0 for peer in parts["state"]["peers"])
        (link,) = parts["state"]["links"]
        assert link["way"] in WAYS and link["round_trip_ms"] > 0
        assert parts["state"]["crossed"][0]["forward_bytes"] > 0
        assert parts["progress"]["timeline"]["spans"] and parts["progress"]["planned"]
        assert parts["state"]["last_checkpoint"] >= 20 and parts["valid"]
    assert (whole["state"]["role"], member["state"]["role"]) == ("host", "member")
    assert [p["name"] for p in member["state"]["peers"] if p["is_this_machine"]] == ["ana"]
    assert {row[0] for row in member["valid"]} <= {row[0] for row in whole["valid"]}
    text = json.dumps(member)
    others = "".join(path.read_text() for path in (tmp_path / "ben").glob("*.json"))
    for secret in (machines.invite, "127.0.0.1:", str(machines.run_folder), others):
        assert secret and secret not in text
    host.stop()
