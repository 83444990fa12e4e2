import math
import struct

import numpy as np
import pytest
from matplotlib.colors import to_hex

from thinwire.report import EvaluationRecord, StageRecord, TraceSpan
from thinwire.report.plots import DPI, loss_figure, plot_loss, plot_step, running_mean, step_figure


def png_size(path):
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def stages(count):
    return [StageRecord(s, f"{s}", 0.1, 0.1, 0.1, "cpu") for s in range(count)]


def spans(microbatches=3):
    """Two stages, one after the other: enough to have every kind of bar."""
    found = []
    for m in range(microbatches):
        found.append(TraceSpan(0, "compute", f"F{m}", m, m + 1))
        found.append(TraceSpan(0, "send", f"F{m}>", m + 1, m + 1.5))
        found.append(TraceSpan(1, "wait", "", m, m + 0.5))
        found.append(TraceSpan(1, "compute", f"B{m}", m + 2, m + 2.75))
        found.append(TraceSpan(1, "send", f"<B{m}", m + 3, m + 3.5))
    found.append(TraceSpan(0, "compute", "U", 9, 10))
    return found


def bars_of(figure):
    (axes,) = figure.axes
    return {
        container.get_label(): [(bar.get_x(), bar.get_width(), bar.get_y()) for bar in container]
        for container in axes.containers
    }


def test_loss_png_has_its_size(tmp_path, make_record):
    path = tmp_path / "new folder" / "loss.png"
    plot_loss([make_record(k) for k in range(1, 20)], [EvaluationRecord(10, 5.0)], path)
    assert png_size(path) == (9 * DPI, 5 * DPI)


def test_loss_figure_has_the_curves_over_tokens(make_record):
    steps = [make_record(k, loss=10.0 - k) for k in (1, 2, 4)]
    evaluations = [EvaluationRecord(0, 11.0), EvaluationRecord(2, 8.5), EvaluationRecord(3, 7.5)]
    (axes,) = loss_figure(steps, evaluations).axes
    train, smooth, valid = axes.lines
    assert list(train.get_xdata()) == [4096, 8192, 16384]
    assert list(train.get_ydata()) == [9.0, 8.0, 6.0]
    assert len(smooth.get_xdata()) == 3
    assert list(valid.get_xdata()) == [0, 8192, 12288]  # step 3 lies between 2 and 4
    assert list(valid.get_ydata()) == [11.0, 8.5, 7.5]
    assert "tokens" in axes.get_xlabel()
    assert len(axes.get_legend().get_texts()) == 3


def test_loss_without_steps_or_evaluations_can_be_drawn(tmp_path, make_record):
    plot_loss([], [], tmp_path / "none.png")
    plot_loss([], [EvaluationRecord(0, 9.0)], tmp_path / "only_valid.png")
    plot_loss([make_record(1, loss=math.nan)], [], tmp_path / "nan.png")
    assert png_size(tmp_path / "none.png") == (9 * DPI, 5 * DPI)


def test_running_mean_smooths_skips_gaps_and_keeps_lines_straight():
    line = np.linspace(5, 3, 200)
    np.testing.assert_allclose(running_mean(line), line)
    noisy = line + np.where(np.arange(200) % 2, 0.1, -0.1)
    assert np.std(np.diff(running_mean(noisy)[10:-10])) < 0.2 * np.std(np.diff(noisy))
    gap = line.copy()
    gap[100] = np.nan
    assert np.isfinite(running_mean(gap)).all()
    assert np.isnan(running_mean(np.array([np.nan, 1.0]))[0])


@pytest.mark.parametrize("count", [1, 4])
def test_step_png_grows_with_the_stages(tmp_path, count):
    path = tmp_path / "step.png"
    plot_step([TraceSpan(0, "compute", "F0", 0, 1)], stages(count), path, "step 1")
    width, height = png_size(path)
    assert width == 13 * DPI
    assert height == pytest.approx((1.9 + 0.8 * count) * DPI, abs=1)


def test_every_span_is_a_bar_at_its_place():
    bars = bars_of(step_figure(spans(), stages(2), "step 7"))
    assert {name: len(group) for name, group in bars.items()} == {
        "wait": 3,
        "forward": 3,
        "send forward": 3,
        "backward": 3,
        "send backward": 3,
        "update": 1,
    }
    assert [(x, width) for x, width, _ in bars["forward"]] == [(0, 1), (1, 1), (2, 1)]
    assert bars["update"][0][:2] == (9, 1)
    compute_rows = {y for _, _, y in bars["forward"]}
    send_rows = {y for _, _, y in bars["send forward"]}
    assert compute_rows == {y for _, _, y in bars["update"]}
    assert min(send_rows) > max(compute_rows)  # y grows downwards: the send lane is below
    assert {y for _, _, y in bars["backward"]} == {y for _, _, y in bars["wait"]}


def test_kinds_differ_in_colour_and_waits_are_hatched():
    (axes,) = step_figure(spans(), stages(2), "step 7").axes
    groups = {group.get_label(): group[0] for group in axes.containers}
    names = ("forward", "backward", "update", "wait")
    assert len({to_hex(groups[name].get_facecolor()) for name in names}) == 4
    assert groups["wait"].get_hatch()
    assert not groups["forward"].get_hatch()


def test_numbers_stand_in_wide_bars_only():
    (axes,) = step_figure(spans(), stages(2), "step 7").axes
    assert sorted(text.get_text() for text in axes.texts) == ["0", "0", "1", "1", "2", "2"]
    narrow = [TraceSpan(0, "compute", f"F{m}", m, m + 1) for m in range(500)]
    (axes,) = step_figure(narrow, stages(1), "step 8").axes
    assert len(axes.containers[0]) == 500
    assert not axes.texts


def test_labels_title_and_legend():
    (axes,) = step_figure(spans(), stages(2), "step 7: GPipe").axes
    assert axes.get_title(loc="left") == "step 7: GPipe"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0\n0", "stage 1\n1"]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend[-2:] == ["send forward", "send backward"]
    assert "seconds" in axes.get_xlabel()
    low, high = axes.get_xlim()
    assert (low, high) == (0, 10)


def test_an_unknown_action_is_drawn_as_other_and_nothing_is_an_empty_chart(tmp_path):
    bars = bars_of(step_figure([TraceSpan(0, "compute", "R0", 0, 1)], stages(1), "t"))
    assert list(bars) == ["other"]
    plot_step([], stages(2), tmp_path / "empty.png", "nothing traced")
    assert (tmp_path / "empty.png").stat().st_size > 0


def test_a_span_of_an_unknown_stage_is_refused():
    with pytest.raises(KeyError):
        step_figure([TraceSpan(5, "compute", "F0", 0, 1)], stages(2), "t")


def test_the_loss_of_images_is_told_per_image(make_record):
    for unit in ("token", "image"):
        (axes,) = loss_figure([make_record(1, unit=unit)], []).axes
        assert axes.get_xlabel() == f"{unit}s seen"
        assert axes.get_ylabel() == f"loss (nats per {unit})"
