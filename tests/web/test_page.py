"""The page as data: what is sent of a run, what may be asked, and who may ask it."""

import io
import json
import math
import re
import threading
import time
from dataclasses import asdict, replace

import httpx
import pytest
from webruns import STEPS, TOKEN, first_of, let_links_decide, messages, step_record

from programs import gone
from thinwire.engine.checkpoint import Checkpoint
from thinwire.errors import ConfigError
from thinwire.report import MetricsWriter, PlainDisplay, metrics
from thinwire.run.record import read_progress
from thinwire.schedule import Links, simulate
from thinwire.settings import load_settings, make_recipe
from thinwire.typed import to_toml
from thinwire.web.follow import TOKENS, Followed
from thinwire.web.page import RunView, compared
from waiting import PROCESS_PATIENCE, wait_until

OWNER = {"headers": {"Authorization": f"Bearer {TOKEN}"}}


def steps_of(folder):
    return [row for row in map(metrics.Row.read, metrics.lines_of(folder)) if row.kind == "step"]


def test_a_finished_run_shows_what_its_folder_holds(finished, serve):
    server = serve(finished)
    points, valid, events, state, progress, settings = first_of(
        server, "points", "valid", "events", "state", "progress", "settings"
    )
    steps, validations = steps_of(finished), metrics.Curves.read(finished).valid
    assert points["step"] == [record.step for record in steps] == list(range(1, STEPS + 1))
    assert points["loss"] == [round(record.loss, 5) for record in steps]
    assert points["hours"][0] == 0 and points["hours"] == sorted(points["hours"])
    assert [loss for _, loss, _ in valid] == [record.loss for record in validations]
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "begin" and kinds[-1] == "end" and "save" in kinds
    assert (state["state"], state["step"], state["run"]) == ("complete", STEPS, "first")
    assert [peer["stages"] for peer in state["peers"]] == [[0], [1]]
    (link,), (sent,), (cut,) = state["links"], state["crossed"], progress["cuts"]
    assert (link["way"], link["round_trip_ms"]) == ("emulated", 4.0)
    assert sent["forward_bytes"] > sent["backward_bytes"] > 0 and cut["ratio_vs_bf16"] > 2
    assert len(progress["time_shares"]) == 2 and progress["timeline"]["spans"]
    assert 'forward = "int8"' in settings["text"]
    invite = httpx.get(server.address + "invite/0", **OWNER)
    assert invite.status_code == 400 and "no run is alive" in invite.json()["error"]


def test_the_plan_stands_beside_what_was_measured(run_folder, serve):
    let_links_decide(run_folder)
    (progress,) = first_of(serve(run_folder), "progress")
    (row,) = progress["planned"]
    # beside the frames of microbatches a cut carries a tally and a verdict
    assert row["planned"] < row["measured"] < 2 * row["planned"] < row["dense"] * 2
    thin, dense = (progress[f"{kind}_step_seconds"] for kind in ("simulated", "dense"))
    assert 0 < thin < dense, "over slow links dense cuts take longer"


def test_what_dense_cuts_would_cost_counts_both_directions(run_folder):
    """A fast uplink into a slow downlink is slow: against the simulator itself."""
    let_links_decide(run_folder)
    settings, progress = load_settings(run_folder, []), read_progress(run_folder)
    (row,) = progress.cuts
    size = row["bf16_bytes_per_token"] * settings.tokens_per_microbatch
    costs = replace(progress.measured_costs, forward_bytes=[size], backward_bytes=[size])
    for up, down in (([40.0, 40.0], [0.0, 0.0]), ([40.0, 40.0], [0.01, 0.01])):
        links = Links(up, down, [0.01])
        found = compared(settings, replace(progress, links=links))["dense_step_seconds"]
        assert found == simulate(settings.schedule(), costs, links).step_seconds
    uplinks_alone = Links([40.0, 40.0], [0.0, 0.0], [0.01])
    assert found > 5 * simulate(settings.schedule(), costs, uplinks_alone).step_seconds
    unknown = replace(progress, links=Links([0.0] * 2, [0.0] * 2, [0.0]))
    assert "dense_step_seconds" not in compared(settings, unknown)


def test_a_run_is_shown_by_the_name_of_its_recipe(run_folder, serve):
    assert first_of(serve(run_folder), "settings")[0]["recipe"] == "", "int8 and int4, none of ours"
    text = to_toml(make_recipe("thin50", ["pipeline.stages=2"]).asked)
    (run_folder / "config.toml").write_text(text)
    assert first_of(serve(run_folder), "settings")[0]["recipe"] == "thin50"


def test_steps_come_as_they_are_written(run_folder, serve):
    server = serve(run_folder)
    with MetricsWriter(run_folder, resume_step=STEPS) as writer:
        writer.step(step_record(STEPS + 1))
        points, seen = (value for kind, _, value in messages(server) if kind == "points"), []
        for value in points:
            seen.append(value)
            if len(seen) == 3:
                break
            writer.step(step_record(STEPS + 1 + len(seen), loss=3.5))
    assert seen[0]["step"] == list(range(1, STEPS + 2))
    assert seen[1]["step"][-1] == STEPS + 2
    assert seen[2]["loss"][-2:] == [3.5, 3.5]


def test_a_resumed_run_takes_back_what_it_trains_again(run_folder):
    view = RunView(run_folder)
    view.refresh()
    with MetricsWriter(run_folder, resume_step=3) as writer:
        writer.step(step_record(4, loss=1.0))
    view._looked = -math.inf
    view.refresh()
    points = view.curves.points()
    assert points["step"] == [1, 2, 3, 4] and points["loss"][-1] == 1.0


def test_a_run_of_a_hundred_thousand_steps_is_thinned(tmp_path):
    count = 100_000
    line = metrics.line_of("step", asdict(step_record(1, loss=4.0)) | {"stages": [], "links": []})
    with (tmp_path / metrics.FILE_NAME).open("w") as file:
        for step in range(1, count + 1):
            row = line.replace('"step": 1,', f'"step": {step},')
            file.write(row.replace('"loss": 4.0', f'"loss": {4 if step % 2 else 2}'))
    view = RunView(tmp_path)
    view.refresh()
    points = view.curves.points()
    most = metrics.MOST_POINTS
    assert most / 2 < len(points["step"]) <= most and points["size"] == 128
    assert points["step"][-1] == count and set(points["loss"]) == {3.0}
    assert len(json.dumps(points)) < 100_000


@pytest.mark.parametrize(
    "path",
    ["/static/../page.py", "/static/%2e%2e/page.py", "/static/..%2fpage.py", "/metrics.jsonl",
     "/static/", "/authority/invite.txt", "/invite/7", "/kick/0"],
)  # fmt: skip
def test_nothing_else_of_the_disk_is_served(finished, serve, path):
    assert httpx.get(serve(finished).address + path.lstrip("/"), **OWNER).status_code in (404, 405)


def test_all_parts_of_the_page_are_there_and_none_is_elsewhere(finished, serve):
    from thinwire.web.page import STATIC

    server = serve(finished)
    page = httpx.get(server.address).text
    named = re.findall(r'(?:src|href)="/static/([^"]+)"', page)
    assert "<title>thinwire</title>" in page and len(named) == 6
    for name in [*named, "uPlot.LICENSE.txt"]:
        answer = httpx.get(f"{server.address}static/{name}")
        assert answer.status_code == 200 and answer.content == (STATIC / name).read_bytes()
        if "uPlot" not in name and name != "icon.svg":
            assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in answer.text


def test_only_the_owner_sees_the_invite_and_acts(run_folder, serve, host):
    server = serve(run_folder)
    invite, kick = server.address + "invite/0", server.address + "kick/0"
    asked = httpx.post(invite, json={"machines": 1}), httpx.post(kick, json={"peer": "ben"})
    for answer in (httpx.get(invite), *asked):
        assert answer.status_code == 403 and "token" in answer.json()["error"]
    hello, state = first_of(server, "hello", "state")
    assert hello["owner"] is False and "secret" not in json.dumps(state)
    found = httpx.get(invite, **OWNER).json()
    assert found["line"] == "thinwire join abc-secret"
    assert found["qr"].startswith("data:image/svg+xml")
    more = httpx.post(invite, json={"machines": 2}, **OWNER).json()
    assert more["line"] == "thinwire join another"
    done = httpx.post(kick, json={"peer": "ben"}, **OWNER)
    assert done.json()["text"] == "ben was removed"
    assert host.asked == [{"ask": "invite", "machines": 2}, {"ask": "kick", "peer": "ben"}]


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"peer": "' + b"x" * 9000 + b'"}'])
def test_what_is_no_request_is_refused(run_folder, serve, host, body):
    headers = OWNER["headers"] | {"Content-Type": "application/json"}
    kick = serve(run_folder).address + "kick/0"
    for wrong in ({"content": body, "headers": headers}, {"data": {"peer": "ben"}, **OWNER}):
        assert httpx.post(kick, **wrong).status_code == 400 and host.asked == []


def test_a_hosted_run_shows_its_peers_and_links(run_folder, serve, host):
    host.peers[1] = host.peer("ben", [1], is_away=True)
    host.waiting_for = "a peer for stage 1"
    (state,) = first_of(serve(run_folder), "state")
    ana, ben, carl = state["peers"]
    assert (ben["machine"], carl["stages"]) == (None, [])
    assert ana["machine"]["latency_ms"] == 15.0 and ana["machine"]["device"] == "cpu (8 cores)"
    (link,) = state["links"]
    assert (link["way"], link["round_trip_ms"]) == ("direct", 31.0)
    assert state["waiting_for"] == "a peer for stage 1"


def test_a_run_without_a_last_word_is_silent(run_folder):
    lines = (run_folder / metrics.FILE_NAME).read_text().splitlines()[:-3]
    rows = (json.dumps(json.loads(line) | {"time": time.time() - 1e6}) for line in lines)
    (run_folder / metrics.FILE_NAME).write_text("\n".join([*rows, ""]))

    def word(event, age, is_own=False):
        row = {"kind": event, "text": "", "time": time.time() - age}
        (run_folder / metrics.EVENTS_FILE).write_text(json.dumps(row) + "\n")
        view = RunView(run_folder, is_own)
        view.refresh()
        return str(json.loads(view.sections["state"])["state"])

    assert word("begin", age=1e5) == "silent"
    assert word("begin", age=1e5, is_own=True) == "training"
    assert word("begin", age=1) == "training"
    assert word("end", age=1e5) == "ended"


def test_the_story_keeps_no_secret_and_no_end_of_a_run_that_was_refused(tmp_path):
    folder, lines = tmp_path / "run", io.StringIO()
    with pytest.raises(ConfigError), Followed(PlainDisplay(lines), "off", "host") as display:
        display.phase("config", "first line")
        raise ConfigError("this folder holds another run")
    assert not folder.exists()
    folder.mkdir()
    with Followed(PlainDisplay(lines), "off", "host") as display:
        display.opened(folder)
        display.phase("invite", "thinwire join secret")
        display.note("ben left\x1b[2J")
    told = [json.loads(line) for line in (folder / metrics.EVENTS_FILE).read_text().splitlines()]
    assert [event["kind"] for event in told] == ["begin", "note", "end"]
    assert "secret" not in str(told) and "\x1b" not in told[1]["text"]
    assert told[0]["time"] > 1.7e9
    assert "thinwire join secret" in lines.getvalue()


def test_the_address_of_a_page_is_printed_and_stays(tmp_path):
    def address(role, listen="127.0.0.1:0"):
        lines = io.StringIO()
        with Followed(PlainDisplay(lines), listen, role) as display:
            display.opened(tmp_path)
            (line,) = [line for line in lines.getvalue().splitlines() if "[web]" in line]
            assert httpx.get(line.split()[1]).status_code in (200, 303)
        return line.split()[1]

    assert "token" not in address("train")
    first = address("host")
    kept = tmp_path / "authority" / "web.json"
    assert kept.stat().st_mode & 0o077 == 0
    assert "?token=" in first and first.split("=")[1] == address("host").split("=")[1]
    assert address("host", "").split("=")[1] == first.split("=")[1]
    kept.write_bytes(b'{"token": "\xff"}')
    assert "?token=" in address("host"), "a damaged file costs the address, not the run"
    assert "token" in address("train", "0.0.0.0:0")


def samples(folder):
    events = map(json.loads, (folder / metrics.EVENTS_FILE).read_text().splitlines())
    return [event["text"] for event in events if event["kind"] == "sample"]


def test_the_model_continues_the_same_words_at_a_checkpoint(run_folder, command, monkeypatch):
    monkeypatch.setattr("os.setpriority", lambda *how: None)  # else it waits for all other tests
    shared: list[tuple[str, str]] = []
    with Followed(PlainDisplay(io.StringIO()), "off", "train", "stage link") as display:
        display.share = lambda kind, text: shared.append((kind, text))
        display.opened(run_folder)
        display.phase("save", f"checkpoint of step {STEPS}")
        wait_until(lambda: shared, PROCESS_PATIENCE)
    (text,) = samples(run_folder)
    assert text.startswith(f"step {STEPS}: stage link") and shared == [("sample", text)]
    words = ("--prompt", "stage link", "--tokens", TOKENS)
    _, written, errors = command("generate", run_folder, *words)
    assert text == f"step {STEPS}: {written.strip()}", errors


def test_a_text_that_is_being_written_ends_with_its_run(run_folder):
    with Followed(PlainDisplay(io.StringIO()), "off", "train", "stage link") as display:
        display.opened(run_folder)
        display.phase("save", f"checkpoint of step {STEPS}")
    wait_until(lambda: "thinwire sample" not in [one.name for one in threading.enumerate()])
    assert samples(run_folder) == []


def test_train_saves_and_writes_a_text_at_a_validation_and_ends_by_ctrl_c(
    thinwire, finished, tmp_path
):
    """Though by its settings it saves at its end alone; and not at the first one only."""
    changes = [f"run.out={tmp_path}", "train.checkpoint_every=0", "train.steps=100000",
               "link.latency_ms=200"]  # fmt: skip
    sets = [word for change in changes for word in ("--set", change)]
    config = finished.parent / "run.toml"
    run = thinwire("train", config, *sets, "--sample", "stage", "--web", "off")
    story = tmp_path / "first" / metrics.EVENTS_FILE
    wait_until(lambda: story.exists() and len(samples(story.parent)) > 1, PROCESS_PATIENCE)
    stages = run.stages()
    run.stop()
    assert len(stages) == 2 and gone(stages) and "stopping after this step" in run.text()
    saved = Checkpoint.open(story.parent)
    saved.verify()
    assert saved.step == json.loads((story.parent / "summary.json").read_text())["steps"]
    step = int(samples(story.parent)[0].split(":")[0].removeprefix("step "))
    assert step in [record.step for record in metrics.Curves.read(story.parent).valid]
    assert not list(story.parent.glob("checkpoints/.sample*"))


def test_watch_serves_runs_until_it_is_ended(thinwire, finished):
    page = thinwire("watch", finished, finished, "--web", "127.0.0.1:0")
    page.wait_for(r"\?token=\S+\n")
    address = page.text().split(" at ")[1].split()[0]
    with httpx.Client(follow_redirects=True, headers={"Accept": "text/html"}) as browser:
        assert "<title>thinwire</title>" in browser.get(address).text
    page.stop(code=0)
