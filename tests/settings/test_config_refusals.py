"""Settings that cannot work are refused, each with what is wrong."""

import pytest

from thinwire.errors import ConfigError

# The fixture's run has 4 layers, 2 stages, 4 microbatches and 4 steps of 8 sequences.


def test_the_settings_below_are_one_change_away_from_a_good_run(make_settings):
    make_settings()
    make_settings(boundary__rank=32)
    make_settings(pipeline__schedule="gpipe", pipeline__stages=4, pipeline__microbatches=1)
    make_settings(optim__warmup=4)
    make_settings(link__mbps_up=0, link__latency_ms=0, optim__clip=0, optim__weight_decay=0)
    make_settings(run__name="my run-2.v1_b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline__stages": 5, "pipeline__microbatches": 8}, "stages = 5 .* 4 layers"),
        ({"pipeline__split": [0, 4]}, "every stage needs at least one"),
        ({"pipeline__microbatches": 1}, "1f1b with pipeline.microbatches = 1 .*stages = 2"),
        ({"pipeline__window": -2}, "pipeline.window = -2 .*; 0 = the schedule's own"),
        ({"train__batch": 9}, "batch = 9 sequences do not divide .*microbatches = 4"),
        ({"train__eval_batches": -2}, "train.eval_batches = -2 must be at least 0"),
        ({"train__checkpoint_every": -2}, "checkpoint_every = -2 .*0 = only at the end, -1 = none"),
        ({"optim__warmup": 5}, "optim.warmup = 5 is longer than train.steps = 4"),
        ({"optim__lr": 0.0}, "optim.lr = 0.0 must be above 0"),
        ({"optim__floor": 1.5}, "optim.floor = 1.5 must be at least 0 and at most 1"),
        ({"link__mbps_up": -1}, "link.mbps_up = -1.0 must be at least 0.001, or 0"),
        ({"data__valid_fraction": 0}, "data.valid_fraction = 0.0 must be above 0 and below 1"),
        ({"boundary__free_layers": 1}, "boundary.free_layers has no meaning .*\"dense\""),
        ({"codec__forward": "bf61"}, 'codec.forward = "bf61": .* did you mean "bf16"'),
        ({"codec__cuts": ["0 forward=fp32"]}, r'codec.cuts\[0\] = "0 forward=fp32" must look like'),
        ({"codec__cuts": ["1: forward=fp32"]}, r"codec.cuts\[0\] .*the cuts here are 0..0"),
        ({"codec__cuts": ["0: forward=fp32"], "pipeline__stages": 1}, "a single stage has no cut"),
        ({"codec__cuts": ["0: foward=fp32"]}, 'unknown leg "foward"; did you mean "forward"'),
        ({"codec__cuts": ["0: forward=fp32 forward=bf16"]}, "forward is given twice"),
        ({"codec__cuts": ["0: forward=fp32", "0: backward=fp32"]}, "cut 0 is listed twice"),
        ({"codec__cuts": ["0: backward=bf61"]}, r'codec.cuts\[0\].backward = "bf61": "bf61"'),
        ({"codec__cuts": ["0: backward=topk(shared)"]}, "topk or randk sent forward"),
        ({"codec__plugins": ["no_such"]}, 'importing "no_such" failed: ModuleNot.*PYTHONPATH'),
        ({"run__seed": 2**63}, "run.seed = 9223372036854775808 must fit into 64 bits"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(make_settings, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_settings(**changes)


@pytest.mark.parametrize(
    "name",
    ["", " ", ".", "..", "/", "/abs", "../up", "a/", "a ", ".hidden", "a/../../b", "a/b", "a\0b",
     "a\nb", "x" * 101],
)  # fmt: skip
def test_run_names_that_are_no_folder_names_are_refused(make_settings, name):
    with pytest.raises(ConfigError, match=r"run.name = .* must be the name of a folder"):
        make_settings(run__name=name)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["link__latency_ms", "optim__lr", "model__rope_theta"])
def test_numbers_that_are_none_are_refused(make_settings, place, value):
    with pytest.raises(ConfigError, match=f"{place.replace('__', '.')} = (nan|-?inf) must be"):
        make_settings(**{place: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "subspace", "rank": 32}, "nothing is saved"),
        ({"mode": "dense", "anchor": "per-stage"}, "no basis"),
        ({"mode": "dense", "rank": 7}, "7 .*32 channels.*leave it at 0"),
        ({"mode": "reparam", "rank": 4, "anchor": "per-stage"}, 'set it to "auto" or "embedding"'),
        ({"mode": "subspace", "rank": 4, "free_layers": 3}, "only the 2 blocks of the last"),
        ({"mode": "projected", "rank": 4, "free_layers": 1}, "all its weights are free"),
        ({"mode": "projected", "rank": 4, "anchor": "embedding"}, "write outside the basis too"),
        ({"mode": "projected", "rank": 4, "table": 8}, "no meaning without boundary.anchor"),
        (
            {"mode": "projected", "rank": 4, "anchor": "per-stage", "table": 4096},
            "must lie between 1 and model.dim",
        ),
    ],
)
def test_cuts_that_cannot_work_are_refused(changes, words, make_settings):
    with pytest.raises(ConfigError, match=words):
        make_settings(**{f"boundary__{k}": v for k, v in changes.items()})
