import dataclasses
import math
import struct

from records import step_record
from thinwire.report import records
from thinwire.report.metrics import Curves, line_of
from thinwire.report.plots import DPI, loss_figure, steps_figure


def png_size(path):
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def curves(*rows):
    """As they are read from the record of a run."""
    found = Curves()
    for row in rows:
        kind = "evaluation" if isinstance(row, records.EvaluationRecord) else "step"
        found.add(line_of(kind, dataclasses.asdict(row)).encode())
    return found


def stages(count):
    return [records.StageRecord(s, f"{s}", 0.1, 0.1, 0.1, "cpu") for s in range(count)]


def spans(microbatches=3):
    """Two stages, one after the other: enough to have every kind of bar."""
    found = []
    for m in range(microbatches):
        found.append(records.TraceSpan(0, "compute", f"F{m}", m, m + 1))
        found.append(records.TraceSpan(0, "send", f"F{m}>", m + 1, m + 1.5))
        found.append(records.TraceSpan(1, "wait", "", m, m + 0.5))
        found.append(records.TraceSpan(1, "compute", f"B{m}", m + 2, m + 2.75))
        found.append(records.TraceSpan(1, "send", f"<B{m}", m + 3, m + 3.5))
    found.append(records.TraceSpan(0, "compute", "U", 9, 10))
    return found


def timeline(found=None, count=2, run="demo", seconds=10.0):
    return records.Timeline(run, 7, seconds, stages(count), spans() if found is None else found)


def bars_of(figure):
    (axes,) = figure.axes
    return {
        container.get_label(): [(bar.get_x(), bar.get_width(), bar.get_y()) for bar in container]
        for container in axes.containers
    }


def test_loss_figure_has_the_curves_over_tokens():
    steps = [step_record(k, loss=10.0 - k) for k in (1, 2, 4)]
    scores = ((0, 11.0), (2, 8.5), (3, 7.5))
    evaluations = [records.EvaluationRecord(step, loss) for step, loss in scores]
    figure = loss_figure(curves(*steps, *evaluations), "demo: loss")
    (axes,), (legend,) = figure.axes, figure.legends
    train, valid = axes.lines
    assert list(train.get_xdata()) == [4096, 8192, 16384]
    assert list(train.get_ydata()) == [9.0, 8.0, 6.0]
    assert list(valid.get_xdata()) == [0, 8192, 12288]  # step 3 lies between 2 and 4
    assert list(valid.get_ydata()) == [11.0, 8.5, 7.5]
    assert "tokens" in axes.get_xlabel()
    assert legend.get_title().get_text() == "demo: loss"
    assert len(legend.get_texts()) == 2, "so short a curve is its own running mean"


def test_loss_without_steps_or_evaluations_can_be_drawn(tmp_path):
    loss_figure(curves(), "").savefig(tmp_path / "none.png")
    loss_figure(curves(records.EvaluationRecord(0, 9.0)), "").savefig(tmp_path / "only_valid.png")
    loss_figure(curves(step_record(1, loss=math.nan)), "").savefig(tmp_path / "nan.png")
    assert png_size(tmp_path / "none.png") == (9 * DPI, 5 * DPI)


def test_every_span_is_a_bar_at_its_place():
    bars = bars_of(steps_figure([timeline()]))
    assert {name: len(group) for name, group in bars.items()} == {
        "wait": 3, "forward": 3, "send forward": 3, "backward": 3, "send backward": 3, "update": 1,
    }  # fmt: skip
    assert [(x, width) for x, width, _ in bars["forward"]] == [(0, 1), (1, 1), (2, 1)]
    assert bars["update"][0][:2] == (9, 1)
    compute_rows = {y for _, _, y in bars["forward"]}
    send_rows = {y for _, _, y in bars["send forward"]}
    assert compute_rows == {y for _, _, y in bars["update"]}
    assert min(send_rows) > max(compute_rows)  # y grows downwards: the send lane is below
    assert {y for _, _, y in bars["backward"]} == {y for _, _, y in bars["wait"]}


def test_two_runs_are_drawn_on_one_scale_under_one_legend(tmp_path):
    quick = timeline([records.TraceSpan(0, "compute", "F0", 0, 1.5)], 2, "thin", seconds=1.5)
    figure = steps_figure([timeline(run="dense"), quick], "One step of each run")
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim() == (0, 10)
    assert first.get_position().x0 == second.get_position().x0
    assert first.get_position().width == second.get_position().width
    assert first.get_title(loc="left") == "dense: step 7, 10 s"
    assert second.get_title(loc="left") == "thin: step 7, 1.5 s"
    assert "seconds" in second.get_xlabel()
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len(set(names)) == len(names) == 6
    steps_figure([timeline(), quick]).savefig(tmp_path / "compare.png")
    assert png_size(tmp_path / "compare.png")[0] == 13 * DPI
