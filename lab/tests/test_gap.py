"""One picture from logs: what arms cost and save, beside what is published."""

import json
import math
from pathlib import Path

import pytest

import thinwire_lab
from thinwire.cli import main
from thinwire_lab.gap import over_length, panels_of, published, rows_of, usual_of, verdict
from thinwire_lab.logs import grounds_of, read_logs
from thinwire_lab.plots import draw

LOGS = Path(thinwire_lab.__file__).parent / "logs"
GAPS = {"dense": 0.0, "thin32": 0.01, "thin100": 0.02}


def loss(label: str, tokens: float, seed: int) -> float:
    return (4 + seed) * (1 + GAPS[label] * (1 + seed)) * (1 + 1e4 / tokens)


def test_the_longest_runs_of_a_log_are_held_against_dense_of_their_seed(write_log):
    runs = read_logs([write_log(loss, [50, 100], seeds=(0, 1))])
    thin32, thin100 = rows_of(grounds_of(runs)[0])
    assert thin32["method"] == "thin32" and thin32["kind"] == "projected + stages' own tables, Muon"
    assert thin32["tokens"] == 100 * 2048 and thin32["seeds"] == 2 and thin32["ratio"] == 26
    assert thin32["gap"] == pytest.approx(0.015)
    assert [thin32["least"], thin32["most"]] == pytest.approx([0.01, 0.02])
    told = "thin32 26x +1.50% (tiny, 4 stages, 0M tokens, 2 seeds); thin100 68x +3.00% (tiny"
    assert told in verdict([thin32, thin100])


def test_one_command_draws_logs_beside_the_literature(write_log, tmp_path, capsys):
    logs = f"{write_log(loss, [100])},convergence-160m"
    main(["lab", "gap", "--logs", logs, "--json", "--out", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)
    by_method = {(row["method"], row.get("stages")): row for row in found["rows"]}
    assert by_method["projected k=8", 4]["gap"] == pytest.approx(0.1013, abs=1e-4)
    assert by_method["subspace k=24", 8]["gap"] == pytest.approx(0.1316, abs=1e-4)
    assert by_method["thin100", 4]["gap"] == pytest.approx(0.02)
    assert all(row["source"] for row in found["rows"]) and len(published()) == 7
    assert (tmp_path / "gap" / "plot.png").stat().st_size > 10_000
    with pytest.raises(SystemExit):
        main(["lab", "gap", "--logs", str(tmp_path / "none.jsonl")])
    assert "no such log; name logs" in capsys.readouterr().err


def test_entropy_coded_arms_are_a_kind_of_their_own_and_named_from_close():
    log = LOGS / "recipes-160m-entropy.jsonl"
    rows = rows_of(grounds_of(read_logs([log]))[0])
    kinds = {row["method"]: row["kind"] for row in rows}
    assert kinds["thin200"] == f"{kinds['thin100']}, entropy-coded"
    (thin200,) = (row for row in rows if (row["method"], row["stages"]) == ("thin200", 4))
    assert thin200["ratio"] == pytest.approx((231.95 + 225.07) / 2, abs=0.01), "the seeds' mean"
    far = {**thin200, "method": "far", "gap": 0.05, "least": 0.05, "most": 0.05}
    axes = draw("gap", panels_of([*rows, far], published())).axes
    names = [{text.get_text() for text in axis.texts} - {"as dense"} for axis in axes]
    assert names[0] == {"far"} and "far" not in names[1]
    assert {"thin50", "thin200", "thin100 rank=33 step(4)/step(3), 8 stages"} <= names[1]


def test_a_trend_over_the_length_is_told_from_chance(write_log):
    def grows(label, tokens, seed):
        chance = 0.0002 * (seed if label != "dense" else 0)
        gap = {"dense": 0.0, "thin32": 0.01 + 0.004 * math.log10(tokens / 2e5), "thin100": 0.02}
        return (4 + (tokens / 2e5) ** -0.5) * (1 + gap[label] + chance)

    log = write_log(grows, [100, 300, 1000], seeds=(0, 1))
    thin32, thin100 = rows_of(read_logs([log]))
    assert thin32["gap per tenfold length"] == pytest.approx(0.004, abs=1e-5)
    assert 0 < thin32["from"] < 0.004 < thin32["to"] < 0.005 and thin32["with length"] == "grows"
    assert thin100["from"] < 0 < thin100["to"] and thin100["with length"] == "chance"
    thin32, _ = rows_of(read_logs([write_log(grows, [100, 300, 1000])]))
    assert thin32["to"] - thin32["from"] > 0.01, "with one seed little is known"
    thin32, _ = rows_of(read_logs([write_log(grows, [100, 300])]))
    assert "gap per tenfold length" not in thin32, "two lengths are too few"


def test_gaps_of_recipes_are_drawn_over_the_length(write_log):
    def drawn(lengths):
        grounds = grounds_of(read_logs([write_log(loss, lengths, seeds=(0, 1))]))
        return over_length(grounds, usual_of([row for own in grounds for row in rows_of(own)]))

    (panel,) = drawn([50, 100])
    thin100, thin32 = panel.lines
    assert (thin32.label, list(thin32.x)) == ("thin32", [0.1024, 0.2048])
    assert thin32.y == pytest.approx([1.5, 1.5]) and thin100.y == pytest.approx([3, 3])
    assert thin32.errors is not None and thin32.errors[1] == pytest.approx([0.5, 0.5])
    assert drawn([100]) == []


def test_arms_with_settings_that_are_gone_are_left_out(write_log):
    log = write_log(loss, [100])
    dense, thin32, thin100 = map(json.loads, log.read_text().splitlines())
    thin32["arm"]["changes"]["boundary"]["gone"] = False  # it changed nothing
    thin100["arm"]["changes"]["boundary"]["gone"] = True
    log.write_text("\n".join(map(json.dumps, (dense, thin32, thin100))))
    assert [run.arm.label for run in read_logs([log])] == ["dense", "thin32"]
