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


NO_NAMES = ("", " ", ".", "..", "/", "/abs", "../up", "a/", "a ", ".hidden", "a/../../b", "a/b",
            "a\0b", "a\nb", "x" * 101)  # fmt: skip
NUMBERS = ("link__latency_ms", "optim__lr", "model__rope_theta")
NONE = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline__stages": 5, "pipeline__microbatches": 8}, "stages = 5 .* 4 layers"),
        ({"pipeline__split": [0, 4]}, "must name one layer or more for each of 2"),
        ({"pipeline__microbatches": 1}, "1f1b with pipeline.microbatches = 1 .*stages = 2"),
        ({"pipeline__window": -2}, "pipeline.window = -2 .*; 0 = the schedule's own"),
        ({"train__batch": 9}, "batch = 9 sequences do not divide .*microbatches = 4"),
        ({"train__eval_batches": -2}, "train.eval_batches = -2 must be at least 0"),
        ({"train__checkpoint_every": -2}, "checkpoint_every = -2 .*0 = only at the end, -1 = none"),
        ({"optim__warmup": 5}, "optim.warmup = 5 is longer than train.steps = 4"),
        ({"optim__lr": 0.0}, "optim.lr = 0.0 must be above 0"),
        ({"optim__floor": 1.5}, "optim.floor = 1.5 must be at least 0 and at most 1"),
        ({"link__latency_ms": 1e13}, "link.latency_ms = .* at most 3,600,000"),
        ({"link__mbps_up": -1}, "link.mbps_up = -1.0 must be at least 0.001, or 0"),
        ({"data__valid_fraction": 0}, "data.valid_fraction = 0.0 must be above 0 and below 1"),
        ({"boundary__free_layers": 1}, "boundary.free_layers has no meaning .*\"dense\""),
        ({"codec__forward": "bf61"}, 'codec.forward = "bf61": .* did you mean "bf16"'),
        ({"codec__cuts": ["0 forward=fp32"]}, r'codec.cuts\[0\] = "0 forward=fp32" must look like'),
        ({"codec__cuts": ["1: forward=fp32"]}, r"codec.cuts\[0\] .*the cuts here are 0..0"),
        ({"codec__cuts": ["0: forward=fp32"], "pipeline__stages": 1}, "a single stage has no cut"),
        ({"codec__cuts": ["0: foward=fp32"]}, "must look like"),
        ({"codec__cuts": ["0: forward=fp32 forward=bf16"]}, "must look like"),
        ({"codec__cuts": ["0: forward=fp32", "0: backward=fp32"]}, "cut 0 is listed twice"),
        ({"codec__cuts": ["0: backward=bf61"]}, r'codec.cuts\[0\].backward = "bf61": "bf61"'),
        ({"codec__cuts": ["0: backward=topk(shared)"]}, "topk or randk sent forward"),
        ({"codec__plugins": ["no_such"]}, 'importing "no_such" failed: ModuleNot.*PYTHONPATH'),
        ({"run__seed": 2**63}, "run.seed = 9223372036854775808 must fit into 64 bits"),
        ({"run__seed": 16**5000}, "= a number of thousands of digits must fit into 64 bits"),
        *(({"run__name": name}, "run.name = .* must be the name of a folder") for name in NO_NAMES),
        *(({key: value}, f"{key.replace('__', '.')} = (nan|-?inf) must be")
          for key in NUMBERS for value in NONE),
        ({"pipeline__delay": 1, "pipeline__schedule": "gpipe"}, "pipeline.delay = 1.*1f1b"),
        ({"lora__rank": 3, "lora__targets": ["q_prj"]},
         'lora.targets\\[0\\] = "q_prj" is not allowed; did you'),
        ({"lora__rank": 3, "lora__targets": []}, "lora.targets is empty"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(make_settings, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_settings(**changes)


AUTO = 'set it to "embedding" or "auto"'
SHARED = {"mode": "subspace", "rank": 6, "anchor": "embedding"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "subspace", "rank": 32}, "nothing is saved"),
        ({"mode": "subspace"}, "ratio"), ({"mode": "dense", "anchor": "per-stage"}, "no basis"),
        ({"mode": "dense", "rank": 7}, r"boundary\.rank has no meaning .*\"dense\": leave it at 0"),
        ({"mode": "dense", "bound": 4.0}, r"boundary\.bound"),
        ({"mode": "subspace", "rank": 4, "bound": 4.0}, r"boundary\.bound"),
        ({"mode": "reparam", "rank": 4, "anchor": "per-stage"}, AUTO),
        ({"mode": "subspace", "rank": 4, "free_layers": 3}, "only the 2 blocks of the last"),
        ({"mode": "projected", "rank": 4, "free_layers": 1}, "free_layers has no meaning"),
        ({"mode": "projected", "rank": 4, "anchor": "embedding"}, "write outside the basis too"),
        ({"mode": "projected", "rank": 4, "table": 8}, "without boundary.anchor .* no meaning"),
        ({"mode": "projected", "rank": 4, "anchor": "per-stage", "table": 4096},
         "must lie between 1 and model.dim"),
        (SHARED | {"mode": "projected"}, 'cannot work with boundary.mode = "projected"'),
        (SHARED | {"basis_update_every": 5}, "basis_update_every cannot work"),
        (SHARED | {"row_tokens": 0}, "row_tokens"),
        (SHARED | {"anchor": "per-stage"}, AUTO),
        (SHARED | {"lora__rank": 2}, "leaves the embedding frozen"),
        (SHARED | {"codec__rows": "int4+zstd"}, "can neither remember nor vary in size"),
        (SHARED | {"codec__rows": "topk(0.1)+ef21"}, "can neither remember nor vary in size"),
        (SHARED | {"codec__rows": "int9"}, "codec.rows"),
        (SHARED | {"pipeline__delay": 1}, "pipeline.delay = 1.*thin32"),
        ({"mode": "subspace", "rank": 8, "basis_update_every": 5, "pipeline__delay": 1},
         "pipeline.delay = 1.*update_every = 0"),
        ({"mode": "subspace", "rank": 6, "basis_update_every": 2, "lora__rank": 3},
         "basis_update_every = 2 cannot work with lora.rank = 3"),
    ],
)  # fmt: skip
def test_cuts_that_cannot_work_are_refused(changes, words, make_settings):
    with pytest.raises(ConfigError, match=words):
        make_settings(**{k if "__" in k else f"boundary__{k}": v for k, v in changes.items()})
