"""The demo: its two arms, and the lines that a newcomer repeats to a friend."""

import re

from thinwire.cli import main
from thinwire.demo import RECIPES, conclusion

QUICK = (
    *("train.steps=2", "train.eval_batches=1", "link.mbps_up=0", "link.mbps_down=0"),
    *("pipeline.stages=2", "pipeline.microbatches=2", "train.batch=4", "model.vocab=300"),
)


def summary(loss, tokens, training, sent, ratio):
    return {"final_valid_loss": loss, "tokens": tokens, "seconds": {"training": training},
            "bytes_sent": {"total": sent}, "ratio_vs_bf16": ratio}  # fmt: skip


def test_the_conclusion_says_bytes_time_and_loss_with_their_direction():
    thin = summary(4.25, 90_000, 30.0, 5_000_000, 26.04)
    dense = summary(4.5, 60_000, 70.0, 120_000_000, 0.999)
    fewer, faster, lower = conclusion({"thin": thin, "dense": dense})
    assert "5.0 MB" in fewer and "120.0 MB" in fewer and "26x fewer" in fewer
    assert "90,000 tokens in 30" in faster and "3.5x faster" in faster
    assert "4.25" in lower and "4.50" in lower and "lower, and sooner" in lower
    thin = summary(5.0, 60_000, 70.0, 5_000_000, 26.0)
    dense = summary(4.0, 60_000, 35.0, 120_000_000, 1.0)
    _, slower, higher = conclusion({"thin": thin, "dense": dense})
    assert "2.0x slower" in slower and "higher, and later" in higher


def test_the_demo_trains_both_arms_and_shows_them_side_by_side(tmp_path, text_folder, capsys):
    places = (f"run.out={tmp_path}", "data.source=text", f"data.path={text_folder}",
              "data.valid_fraction=0.1")  # fmt: skip
    main(["demo", *(word for key in (*QUICK, *places) for word in ("--set", key))])
    shown = capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {f"demo-{arm}" for arm in RECIPES}
    assert re.search(r"sent .*, the dense run .*: 2\dx fewer bytes", shown)
    assert (tmp_path / "demo-thin" / "plots" / "compare.png").stat().st_size > 0
    lines = shown.split("[start]")[0].splitlines()
    lines = [line for line in lines if not re.match(r"\[[a-z ]+\] +\d+ %", line)]  # of the data
    assert len(lines) < 12, "a newcomer does not read a screen of settings first"
