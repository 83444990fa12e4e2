import math

import pytest

from tables import as_text
from thinwire.report import summary_table
from thinwire.report.table import saving


@pytest.fixture
def summary():
    cuts = [
        {"cut": b, "forward_bytes_per_token": 132.4 + b, "backward_bytes_per_token": 264.8 - b,
         "bf16_bytes_per_token": 2048.0, "ratio_vs_bf16": 10.31 + b,
         "link_utilisation": 0.83 if b == 0 else math.nan}
        for b in range(2)
    ]  # fmt: skip
    waits = {"neighbour": 0.2, "link": 0.05, "basis": 0.0, "verdict": 0.04}
    shares = [
        {"stage": stage, "compute": 0.61 - 0.1 * stage, "update": 0.06, "wait": 0.29,
         "wait_for": waits, "other": 0.04 + 0.1 * stage}
        for stage in range(2)
    ]  # fmt: skip
    return {
        "final_train_loss": 3.31234, "final_train_loss_steps": 10, "last_train_loss": 3.2,
        "final_valid_loss": 3.4567, "valid_losses": [[0, 10.8123], [100, 4.2], [200, 3.4567]],
        "valid_tokens": 65_536, "tokens_per_s": 3412.3,
        "steps": 200, "steps_run": 200, "steps_planned": 200, "first_step": 0, "epochs": 1,
        "timed": {"steps": 194, "tokens_per_step": 4096, "seconds": 232.9, "which": "steady"},
        "cuts": cuts, "ratio_vs_bf16": 15.47, "link_utilisation": 0.71,
        "bubble_fraction": 0.27, "simulated_bubble_fraction": 0.21,
        "step_seconds_median": 1.2345, "simulated_step_seconds": 1.1, "time_shares": shares,
        "config_hash": "a1b2c3d4", "seed": 17, "total_seconds": 252.3,
        "seconds": {"start": 9.5, "training": 238.1, "validation": 3.2, "waiting": 0, "other": 1.5},
        "bytes_sent": None, "control_bytes": 0, "space": None,
    }  # fmt: skip


def line_with(text, start):
    return next(line for line in text.splitlines() if line.startswith(start))


def fact(text, name):
    """What stands behind a name among the facts, with its further lines."""
    lines = text.splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith(f"{name}  "))
    found = [lines[first].removeprefix(name).strip()]
    for line in lines[first + 1 :]:
        if not line.startswith("   "):
            break
        found.append(line.strip())
    return " ".join(found)


def test_summary_has_the_numbers(summary):
    text = as_text(summary_table(summary))
    for name, told in {
        "validation loss": "10.8123 -> 3.4567 nats per token (step 0 -> 200), of 65,536 tokens",
        "training loss": "3.3123 (mean of the last 10 steps), 3.2000 in the last",
        "steps": "200 of 200",
        "speed": "3,412 tokens/s: 194 steps of 4,096 tokens in 3m53s; not counted: the first 2, "
        "and those right after a validation",
        "time": "4m12s: 9.50 s start, 3m58s training, 3.20 s validation, 1.50 s saving and ending",
        "step time": "1.23 s measured (median), 12% above the 1.10 s simulated from the run's "
        "compute times and bytes",
        "bubble": "27 % of the stages' time in a step is not compute (simulated: 21 %)",
        "bytes at the cuts": "15.5x fewer bytes than dense bf16, headers included",
        "busiest uplink": "sends 71 % of the time",
        "settings": "hash a1b2c3d4, seed 17",
    }.items():
        assert fact(text, name) == told
    cut = "132.4 264.8 2,048.0 10.3x fewer 83 %"
    assert line_with(text, "0     0, 1").split()[3:] == cut.split()
    assert line_with(text, "1     1, 2").split()[-4:] == ["2,048.0", "11.3x", "fewer", "-"]
    shares = line_with(text, "0      ").replace(" %", "").split()
    assert shares == ["0", "61", "6", "20", "5", "4", "4"]
    assert "basis" not in text, "no stage waited for one"


def test_a_resumed_run_counts_its_own_steps(summary):
    short = summary | {"steps": 24, "steps_run": 4, "steps_planned": 24,
                       "final_train_loss_steps": 4, "first_step": 20}  # fmt: skip
    text = as_text(summary_table(short))
    assert fact(text, "steps") == "24 of 24; 4 in this run, which resumed at step 20"
    assert "(mean of the last 4 steps)" in fact(text, "training loss")
    one = as_text(summary_table(summary | {"final_train_loss_steps": 1}))
    assert fact(one, "training loss") == "3.2000 in the only step"


def test_a_run_that_was_formed_again_says_so(summary):
    seconds = {"start": 10.0, "training": 90.0, "validation": 2.0, "waiting": 40.0, "other": 8.0}
    again = {"steps_run": 209, "epochs": 3, "total_seconds": 150.0}
    text = as_text(summary_table(summary | again | {"seconds": seconds}), width=200)
    assert fact(text, "steps") == "200 of 200; 9 trained twice, since a peer was lost after them"
    assert fact(text, "epochs").startswith("3: the run was formed again")
    assert "40.0 s waiting for peers, 8.00 s saving and ending" in fact(text, "time")


@pytest.mark.parametrize(
    ("ratio", "told"),
    [(12.34, "12.3x fewer"), (123.4, "123x fewer"), (99.96, "100x fewer"), (1.2, "1.20x fewer"),
     (1.004, "no saving"), (0.999, "no saving"), (0.5, "2.00x more"), (None, "-"), (math.nan, "-")],
)  # fmt: skip
def test_a_comparison_of_bytes_has_a_direction(summary, ratio, told):
    assert saving(ratio) == told
    text = as_text(summary_table(summary | {"ratio_vs_bf16": ratio}))
    if told == "-":
        assert "bytes at the cuts" not in text, "what is not known is left out"
    else:
        assert fact(text, "bytes at the cuts").startswith(told)


def test_a_loss_that_is_not_finite_is_named_with_its_reason(summary):
    bad = {"final_train_loss": math.nan, "final_valid_loss": math.nan}
    bad |= {"valid_losses": [[0, 10.8123], [200, math.nan]]}
    text = as_text(summary_table(summary | bad))
    assert "10.8123 -> NaN nats per token" in fact(text, "validation loss")
    assert fact(text, "training loss") == (
        "NaN (mean of the last 10 steps, of which one was not finite), 3.2000 in the last"
    )


def test_tables_are_ascii_without_colour_within_80_columns(summary, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = as_text(summary_table(summary))
    assert text.isascii()
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "..." not in text


def test_every_byte_is_in_the_summary_with_those_of_validations(summary):
    assert "bytes sent" not in as_text(summary_table(summary)), "not said, so not shown"
    kinds = {"FORWARD": 3_000_000, "EVALUATE": 400_000, "PROBE": 60_000, "VALIDATED": 40_000}
    sent = {"by_kind": {**kinds, "BYE": 64}, "total": 3_500_064}
    text = as_text(summary_table(summary | {"bytes_sent": sent}))
    told = "3.5 MB between stages, 500.0 kB of it for validations"
    assert line_with(text, "bytes sent").endswith(told)
    quiet = {"by_kind": {}, "total": 0}
    text = as_text(summary_table(summary | {"bytes_sent": quiet}))
    assert "0 B between stages, 0 B of it" in line_with(text, "bytes sent")
