import math

import pytest

from thinwire.report import as_text, comparison_table, summary_table


@pytest.fixture
def summary():
    return {
        "final_train_loss": 3.31234,
        "last_train_loss": 3.2,
        "final_valid_loss": 3.4567,
        "valid_losses": [[0, 10.8123], [100, 4.2], [200, 3.4567]],
        "tokens_per_s": 3412.3,
        "steps": 200,
        "boundaries": [
            {
                "boundary": b,
                "forward_bytes_per_token": 132.4 + b,
                "backward_bytes_per_token": 264.8 - b,
                "bf16_bytes_per_token": 2048.0,
                "ratio_vs_bf16": 10.31 + b,
                "link_utilisation": 0.83 if b == 0 else math.nan,
            }
            for b in range(2)
        ],
        "ratio_vs_bf16": 15.47,
        "link_utilisation": 0.71,
        "bubble_fraction": 0.27,
        "step_seconds_median": 1.2345,
        "simulated_step_seconds": 1.1,
        "time_shares": [
            {"stage": 0, "compute": 0.61, "wait": 0.29, "update": 0.06, "other": 0.04},
            {"stage": 1, "compute": 0.52, "wait": 0.38, "update": 0.07, "other": 0.03},
        ],
        "config_hash": "a1b2c3d4",
        "seed": 17,
        "total_seconds": 252.3,
    }


def line_with(text, start):
    return next(line for line in text.splitlines() if line.startswith(start))


def test_summary_has_the_numbers(summary):
    text = as_text(summary_table(summary))
    assert "10.8123 -> 3.4567  (step 0 -> 200)" in line_with(text, "validation loss")
    assert "3.3123 (mean of the last 10 steps), last 3.2" in line_with(text, "training loss")
    assert "3,412 tokens/s, 200 steps in 4m12s" in line_with(text, "speed")
    assert "1.234 s measured" in text and "1.100 s simulated (+12 %)" in text
    assert "27 %" in line_with(text, "pipeline bubble")
    assert "15.5x" in line_with(text, "bytes vs bf16")
    assert "71 %" in line_with(text, "busiest uplink")
    assert "a1b2c3d4, seed 17" in line_with(text, "config")
    assert line_with(text, "0 -> 1").split()[3:] == [
        "132.4", "264.8", "2,048.0", "10.3x", "83", "%",
    ]  # fmt: skip
    assert line_with(text, "1 -> 2").split()[3:] == ["133.4", "263.8", "2,048.0", "11.3x", "-"]
    assert line_with(text, "0  ").split() == ["0", "61", "%", "29", "%", "6", "%", "4", "%"]
    assert line_with(text, "1  ").split() == ["1", "52", "%", "38", "%", "7", "%", "3", "%"]


def test_tables_are_ascii_without_colour_within_80_columns(summary, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    both = as_text(summary_table(summary)) + as_text(comparison_table({"a": summary, "b": summary}))
    assert both.isascii()
    assert "\x1b" not in both
    assert max(len(line) for line in both.splitlines()) <= 80
    assert "..." not in both


def test_one_stage_has_no_boundaries_and_nothing_simulated(summary):
    summary |= {"boundaries": [], "simulated_step_seconds": None, "ratio_vs_bf16": None}
    summary |= {"link_utilisation": math.nan, "valid_losses": [[200, 3.4567]]}
    text = as_text(summary_table(summary))
    assert "boundary" not in text
    assert "- s simulated\n" in text
    assert line_with(text, "validation loss").split() == ["validation", "loss", "3.4567"]
    assert line_with(text, "busiest uplink").split()[-1] == "-"


def test_an_empty_summary_is_all_dashes():
    text = as_text(summary_table({}))
    assert not any(character.isdigit() for character in text.replace("bf16", ""))


def test_every_byte_is_in_the_summary_with_those_of_validations(summary):
    assert "bytes sent" not in as_text(summary_table(summary)), "not said, so not shown"
    sent = {"by_kind": {"FORWARD": 3_000_000, "EVALUATE": 500_000, "BYE": 64}, "total": 3_500_064}
    text = as_text(summary_table(summary | {"bytes_sent": sent}))
    assert line_with(text, "bytes sent").endswith(
        "3.5 MB over all links, 500.0 kB of it for validations"
    )
    quiet = {"by_kind": {}, "total": 0}
    text = as_text(summary_table(summary | {"bytes_sent": quiet}))
    assert "0 B over all links, 0 B of it" in line_with(text, "bytes sent")


def test_the_subspace_has_its_lines_where_there_is_one(summary):
    assert "basis" not in as_text(summary_table(summary | {"space": None}))
    moves = [
        {"step": step, "energy_before": 0.1 * step, "energy_after": 0.1 * step + 0.05}
        for step in (1, 2, 3)
    ]
    space = {"largest_drift": 1.25e-7, "moves": moves}
    text = as_text(summary_table(summary | {"space": space}))
    assert line_with(text, "subspace drift").split()[2:] == ["1.2e-07", "at", "most"]
    assert line_with(text, "basis moves").endswith("3, captured energy 10 % -> 35 %")
    still = as_text(summary_table(summary | {"space": {"largest_drift": 0.5, "moves": []}}))
    assert "5.0e-01" in line_with(still, "subspace drift") and "basis moves" not in still


def test_comparison_has_a_row_per_run(summary):
    slow = summary | {"tokens_per_s": 100.0, "final_valid_loss": 3.3, "ratio_vs_bf16": 1.0}
    text = as_text(comparison_table({"thin": summary, "dense": slow, "unknown": {}}))
    assert line_with(text, "thin").split() == [
        "thin", "3.4567", "3,412", "133.4", "264.8", "15.5x", "81.4",
    ]  # fmt: skip
    assert line_with(text, "dense").split() == [
        "dense", "3.3000", "100", "133.4", "264.8", "1x", "2,777.8",
    ]  # fmt: skip
    assert line_with(text, "unknown").split() == ["unknown"] + ["-"] * 6


def test_long_run_names_fold_instead_of_squeezing_the_numbers(summary):
    text = as_text(comparison_table({"a-run-with-a-very-long-name-and-no-spaces" * 2: summary}))
    assert "3.4567" in text and "81.4" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_markup_in_names_is_left_alone(summary):
    assert "[bold]x[/bold]" in as_text(comparison_table({"[bold]x[/bold]": summary}))


def test_a_run_on_images_has_its_accuracy_and_counts_images(summary):
    assert "accuracy" not in as_text(summary_table(summary)), "not said, so not shown"
    accuracies = [[0, 0.1], [100, 0.5], [200, 0.91234]]
    text = as_text(summary_table(summary | {"accuracies": accuracies, "unit": "image"}))
    assert line_with(text, "accuracy").split()[1:] == ["10.00", "%", "->", "91.23", "%"]
    assert "3,412 images/s" in line_with(text, "speed")
    assert "Bytes per image at each boundary" in text and "token" not in text
    once = as_text(summary_table(summary | {"accuracies": accuracies[:1]}))
    assert line_with(once, "accuracy").split()[1:] == ["10.00", "%"]
