"""The planner: sizes are the real ones, answers repeat, and worse is never better."""

import itertools
import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from settings_values import narrow
from thinwire.codec import Leg, Place, parse_codec
from thinwire.engine.build import StageBuilder, Weights, model_weights, stage_weights
from thinwire.model import architecture
from thinwire.model.optim import StageOptimizer, orthogonalised, orthogonalising_flops
from thinwire.plan import (
    Rates,
    block_memory,
    estimate_costs,
    make_plan,
    measure_rates,
    plan_text,
    plan_to_plain,
)
from thinwire.schedule import grid
from thinwire.settings import Settings, crossing, machine_cores
from thinwire.wire import Frame, FrameKind, encode

RATE = 5e9  # FLOP/s: compute and links of the tiny run then matter alike


@pytest.fixture
def slow_link(make_settings):
    link = {"link__emulate": True, "link__mbps_up": 20.0, "link__mbps_down": 30.0,
            "link__latency_ms": 5.0}  # fmt: skip
    return lambda **changes: make_settings(**{**link, **changes})


@pytest.mark.parametrize("boundary", [{}, narrow("projected"), narrow("subspace", rank=3)])
def test_what_crosses_is_known_from_the_settings_alone(boundary, slow_link, monkeypatch):
    """A plan derives no basis: of a large model that takes minutes, and it is not needed."""
    settings = slow_link(pipeline__stages=4, **boundary)
    builder = StageBuilder(settings, torch.device("cpu"))
    ids = torch.zeros(settings.microbatch_size, settings.model.context, dtype=torch.long)
    z = ids
    for cut in range(3):
        z = builder.build(cut)(z, ids)
        assert tuple(z.shape) == crossing.wire_shape(settings)

    def derived(*arguments):
        raise AssertionError("a plan derived a basis")

    monkeypatch.setattr("thinwire.engine.build.random_basis", derived)
    monkeypatch.setattr("thinwire.engine.build.fixed_table", derived)
    plan = make_plan(settings, RATE)
    assert plan.weights == [stage_weights(settings, stage) for stage in range(4)]


@pytest.mark.parametrize("forward", ["fp32", "bf16"])
@pytest.mark.parametrize("backward", ["fp64", "int8"])
@pytest.mark.parametrize("microbatches", [2, 4])
def test_frame_bytes_are_those_of_real_frames(make_settings, forward, backward, microbatches):
    codecs = {"codec__forward": forward, "codec__backward": backward}
    settings = make_settings(pipeline__microbatches=microbatches, **codecs)
    shape = (8 // microbatches, settings.model.context, settings.model.dim)
    sizes = []
    for name, kind, leg in ((forward, FrameKind.FORWARD, Leg.FORWARD),
                            (backward, FrameKind.BACKWARD, Leg.BACKWARD)):  # fmt: skip
        codec = parse_codec(name)
        payload = codec.pack(torch.zeros(shape), Place(leg, 0, 0))
        sizes.append(len(encode(Frame(kind, codec=codec.tag, shape=shape, payload=payload))))
    assert crossing.frame_bytes(settings) == tuple(sizes)
    costs = estimate_costs(settings, RATE)
    assert (costs.forward_bytes, costs.backward_bytes) == ([sizes[0]], [sizes[1]])


def test_each_cut_is_planned_with_its_own_codecs(slow_link):
    codecs = {"codec__forward": "bf16", "codec__backward": "fp32"}
    settings = slow_link(pipeline__stages=3, codec__cuts=["1: forward=fp64"], **codecs)
    elements = settings.microbatch_size * settings.model.context * settings.model.dim
    sizes = [(2 * elements + 64, 4 * elements + 64), (8 * elements + 64, 4 * elements + 64)]
    assert [crossing.frame_bytes(settings, cut) for cut in range(2)] == sizes
    plan = make_plan(settings, RATE)
    planned = zip(plan.costs.forward_bytes, plan.costs.backward_bytes, strict=True)
    assert [*planned] == sizes
    text = plan_text(plan)
    assert "cut 0, per microbatch" in text and "cut 1, per microbatch" in text
    assert "each cut" not in text and "at most" not in text
    rows = plan_to_plain(plan)["cuts"]
    assert [(row["forward_bytes"], row["backward_bytes"]) for row in rows] == sizes
    for name, kind, word in (("int4", "exact", ""), ("int4+zstd", "limits", "at most "),
                             ("step(3)+zstd", "expected", "about ")):  # fmt: skip
        of_all = make_plan(slow_link(codec__forward=name), RATE)
        assert plan_to_plain(of_all)["cuts"][0]["bytes_are"] == kind
        assert f"each cut, per microbatch: {word}" in plan_text(of_all)
    alike = plan_text(make_plan(slow_link(pipeline__stages=3), RATE))
    assert "each cut, per microbatch" in alike and "cut 0" not in alike


@pytest.mark.parametrize(
    ("preset", "split"),
    [("tiny", [4]), ("tiny", [1, 3]), ("mini", [3, 1, 2, 2]), ("8b", [8, 8, 8, 8])],
)
def test_the_stages_hold_all_parameters_once(preset, split):
    pipeline = {"stages": len(split), "split": split}
    settings = Settings.from_plain({"model": {"preset": preset}, "pipeline": pipeline})
    counts = [stage_weights(settings, stage).count for stage in range(len(split))]
    assert sum(counts) == model_weights(settings).count
    assert make_plan(settings, 1e15).parameters == counts


def matrix_flops(counter):
    """By torch's own counter; attention apart, whose kernels torch counts unevenly."""
    counted = counter.get_flop_counts()["Global"]
    return sum(n for op, n in counted.items() if "attention" not in str(op))


def test_flops_are_those_that_torch_counts(make_settings):
    model = make_settings().model
    blocks = range(2, model.layers)
    sequences, context = 2, model.context
    x_BTD = torch.zeros(sequences, context, model.dim)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for plan in architecture(model).stage_layers(blocks):
            x_BTD = plan.make()(x_BTD)
    matrices = matrix_flops(counter)
    tokens = sequences * context
    attention = len(blocks) * 2 * tokens * context * model.dim  # two products, half of it masked
    family = architecture(model)
    assert family.forward_flops(blocks, sequences) == matrices + attention
    head = 2 * tokens * model.dim * model.vocab
    without_head = family.forward_flops(range(2), sequences)
    assert without_head == family.forward_flops(blocks, sequences) - head
    assert without_head == 2 * family.probe(sequences, 1e12)[2]


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 4), ("gpipe", 2)])
@pytest.mark.parametrize(("key", "from_best_to_worst"), [
    ("link__mbps_up", [0.0, 200.0, 40.0, 20.0, 13.0, 5.0, 1.0]),
    ("link__mbps_down", [0.0, 200.0, 40.0, 20.0, 13.0, 5.0, 1.0]),
    ("link__latency_ms", [0.0, 1.0, 5.0, 20.0, 50.0, 200.0]),
    ("link__jitter_ms", [0.0, 2.0, 50.0]),
    ("codec__forward", ["bf16", "fp32", "fp64"]),
])  # fmt: skip
def test_a_worse_link_never_plans_a_faster_step(
    slow_link, schedule, stages, key, from_best_to_worst
):
    own = {"pipeline__schedule": schedule, "pipeline__stages": stages}
    settings = [slow_link(**own, **{key: value}) for value in from_best_to_worst]
    seconds = [make_plan(each, RATE).simulation.step_seconds for each in settings]
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(seconds))
    assert seconds[-1] > seconds[0], "the link does enter the estimate"


def test_the_text_answers_what_a_person_asks_and_programs_get_json(slow_link):
    settings = slow_link()
    plan = make_plan(settings, 2e12)
    text = plan_text(plan)
    assert text.startswith("An estimate: nothing is trained.")
    for wanted in (
        "from a compute rate that is given",
        f"{model_weights(settings).count:,} parameters",
        "compute: 2.0 TFLOP/s per stage, as given; a machine per stage",
        "20 Mbps up, 30 Mbps down per host, 5 ms one way",
        "window  seconds per step  microbatches held by each stage",
        "stage      parameters     memory  layers",
        "blocks 2..3",
        f"{plan.simulation.step_seconds:.3f} s per step",
        "not counting start, validations and checkpoints",
        grid(plan.simulation.schedule),
    ):
        assert wanted in text
    assert text.count("<- this run") == 1
    plain = plan_to_plain(plan)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["config_hash"] == settings.hash
    assert plain["tokens_per_s"] == settings.tokens_per_step / plain["step_seconds"]
    assert (plain["forward_bytes"], plain["backward_bytes"]) == crossing.frame_bytes(settings)


def test_without_a_rate_it_is_measured_on_this_machine(make_settings):
    settings = make_settings(run__precision="fp32")
    threads = torch.get_num_threads()
    assert all(0 < rate < math.inf for rate in measure_rates(settings, repeats=1))
    assert torch.get_num_threads() == threads, "measuring leaves the process as it was"
    plan = make_plan(settings)
    assert plan.flops_per_s > 0 and plan.simulation.cores == machine_cores()
    assert all(update > 0 for update in plan.costs.update)
    assert f"{machine_cores()} cores shared by all stages" in plan_text(plan)
    assert "measured here with one block" in plan_text(plan)
    assert plan_to_plain(plan)["flops_are_measured"] is True


def test_an_update_that_takes_long_is_computed_from_its_products(make_settings, monkeypatch):
    """Muon's of a block of 8b would keep a CPU busy for minutes."""
    updated, step = [], StageOptimizer.step
    monkeypatch.setattr(StageOptimizer, "step", lambda self, lr: updated.append(step(self, lr)))
    settings = make_settings(optim__name="muon")
    for most, updates in ((60.0, 2), (0.0, 1)):
        monkeypatch.setattr("thinwire.plan._MEASURE_SECONDS", most)
        assert 0 < measure_rates(settings, repeats=0).updates < math.inf
        assert len(updated) == updates, "with matrices and without"
        updated.clear()
    for shape in ((2, 24, 40), (40, 24)):
        with FlopCounterMode(display=False) as counted:
            orthogonalised(torch.ones(shape))
        matrices = math.prod(shape[:-2])
        assert counted.get_total_flops() == matrices * orthogonalising_flops(torch.Size(shape))


@pytest.mark.parametrize(("threads", "at_once"), [(1, 2.0), (2, 1.0)])
def test_stages_of_one_machine_share_its_cores(threads, at_once, make_settings, monkeypatch):
    monkeypatch.setattr("thinwire.plan.machine_cores", lambda: 2)
    monkeypatch.setattr("thinwire.plan.measure_rates", lambda settings: Rates(RATE))
    plan = make_plan(make_settings(run__threads=threads))
    alone = make_plan(plan.settings, RATE).simulation
    assert plan.simulation.cores == at_once
    slower = plan.simulation.step_seconds > alone.step_seconds
    assert slower == (threads == 2)
    if threads == 2:
        assert plan.simulation.bound == "compute shared by all stages"


def test_a_slow_last_stage_gets_a_split_suggested(make_settings):
    head = {"model__layers": 12, "model__vocab": 2048, "pipeline__stages": 3}
    settings = make_settings(**head)
    plan = make_plan(settings, RATE)
    assert plan.simulation.compute_seconds[2] > 2 * plan.simulation.compute_seconds[1]
    assert plan.better_split is not None
    counts, seconds = plan.better_split
    assert counts[2] < 4 and seconds < 0.9 * plan.simulation.step_seconds
    assert f"note: pipeline.split = {counts} would take {seconds:.3f} s per step" in plan_text(plan)
    better = make_plan(make_settings(**head, pipeline__split=counts), RATE)
    assert better.simulation.step_seconds == pytest.approx(seconds)
    assert better.better_split is None and "note: pipeline.split" not in plan_text(better)
    plain = plan_to_plain(plan)
    assert plain["better_split"] == counts and plain["better_split_step_seconds"] == seconds


def test_very_many_microbatches_are_planned_in_a_few_lines(slow_link):
    settings = slow_link(pipeline__microbatches=64, train__batch=64)
    plan = make_plan(settings, RATE)
    assert len(plan.windows) <= 12
    assert len(plan_text(plan)) < 5000 and "slots are left out" in plan_text(plan)
    assert plan_to_plain(plan)["schedule"].count("F") == 2 * 64, "whole for programs"


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_frozen_weights_have_neither_gradient_nor_state(precision, make_settings):
    lora = {"lora__rank": 2, "run__precision": precision}
    settings = make_settings(**lora)
    stages = [StageBuilder(settings, torch.device("cpu")).build(stage) for stage in range(2)]
    plan = make_plan(settings, RATE)
    for stage, found, built in zip(range(2), plan.weights, stages, strict=True):
        parameters = list(built.parameters())
        assert found.bytes == sum(p.element_size() * p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        assert 0 < found.trained == trained < found.count
        before = block_memory(settings, settings.split()[stage], Weights(), 0)
        states = 3 * 8 if precision == "fp64" else 3 * 4 + 2  # gradient, moments; a rounded copy
        expected = before + found.bytes + trained * states
        assert block_memory(settings, settings.split()[stage], found, 0) == expected
    text, plain = plan_text(plan), plan_to_plain(plan)
    assert "adapters of rank 2" in text and "with all weights trained it would take" in text
    assert plain["trained_parameters"] == [found.trained for found in plan.weights]
    full = make_plan(make_settings(run__precision=precision), RATE)
    assert max(full.memory_bytes) > max(plan.memory_bytes)
    assert "trained:" not in plan_text(full)


def test_a_plan_says_what_delayed_updates_bring(make_settings):
    link = {"link__emulate": True, "link__latency_ms": 10.0, "pipeline__window": 8}
    link |= {"pipeline__stages": 4, "pipeline__microbatches": 8}
    drained = make_plan(make_settings(**link), RATE)
    delayed = make_plan(make_settings(**link, pipeline__delay=8), RATE)
    now, then = (plan.simulation.step_seconds for plan in (delayed, drained))
    assert now * 1.1 < then
    assert (delayed.undelayed_seconds, drained.undelayed_seconds) == (then, None)
    assert "delay" not in plan_text(drained)
    assert f"(pipeline.delay = 0) a step would take {then:.3f} s" in plan_text(delayed)
    assert plan_to_plain(delayed)["undelayed_step_seconds"] == then
    assert max(delayed.memory_bytes) > max(drained.memory_bytes)


def test_frozen_matrices_have_no_gradient_to_compute(make_settings):
    settings = make_settings(lora__rank=2)
    model, blocks = settings.model, range(2, 4)
    stage = StageBuilder(settings, torch.device("cpu")).build(1)
    x_BTD = torch.zeros(2, model.context, model.dim, dtype=torch.float64, requires_grad=True)
    output = stage(x_BTD)
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    matrices = matrix_flops(counter)
    tokens = x_BTD.shape[:2].numel()
    adapters = 2 * 2 * tokens * sum(p.numel() for p in stage.parameters() if p.requires_grad)
    family = architecture(model)
    attention = 2 * len(blocks) * 2 * tokens * model.context * model.dim
    assert family.backward_flops(blocks, 2, frozen=True) == matrices - adapters + attention
    assert family.backward_flops(blocks, 2) == 2 * family.forward_flops(blocks, 2)


def test_memory_counts_weights_state_and_what_is_in_flight(make_settings):
    settings = make_settings()
    parameters = stage_weights(settings, 0).count
    weight_bytes = parameters * 8  # float64

    def memory(in_flight, **changes):
        changed = make_settings(**changes)
        return block_memory(changed, changed.split()[0], stage_weights(changed, 0), in_flight)

    assert memory(0) == 4 * weight_bytes, "weight, gradient and AdamW's two moments"
    assert memory(0, optim__name="muon") == 3 * weight_bytes
    lossy = {"run__precision": "bf16", "codec__forward": "bf16", "codec__backward": "bf16"}
    rounded = memory(0, **lossy)
    assert rounded == parameters * (4 * 4 + 2), "float32, and one copy of the weights in bfloat16"
    assert memory(0, pipeline__delay=1) == 6 * weight_bytes, "weights and gradients twice"
    assert memory(0, pipeline__delay=1, **lossy) == parameters * (6 * 4 + 2 * 2)
    one = memory(1) - memory(0)
    assert one > 0 and memory(3) - memory(0) == 3 * one
    kept = settings.microbatch_size * settings.model.context * settings.model.dim * 8
    with_recompute = memory(1, pipeline__recompute=True) - memory(0, pipeline__recompute=True)
    assert with_recompute == 2 * kept, "the input of each of the two blocks"


def test_rows_of_a_shared_embedding_are_counted(slow_link):
    shared = narrow("subspace", anchor="embedding")
    settings = slow_link(**shared, codec__rows="fp64", boundary__row_steps=10)
    size = crossing.row_bytes(settings)
    rows = (size - 64) // (8 * 32)
    assert size == 64 + 8 * 32 * rows and 300 / 10 < rows < 60  # all take turns, few come often
    plan = make_plan(settings, RATE)
    assert plan.costs.row_bytes == [size]
    told = plan_to_plain(plan)["cuts"][0]
    assert told["row_bytes"] == size
    per_token = size / settings.tokens_per_step
    assert f"for rows of the embedding ({per_token:,.1f} bytes per token)" in plan_text(plan)
    fixed = slow_link(**{**shared, "boundary__anchor": "fixed"})
    assert crossing.row_bytes(fixed) == 0 and "embedding" not in plan_text(make_plan(fixed, RATE))
    frames = sum(crossing.frame_bytes(settings)) / settings.tokens_per_microbatch
    assert crossing.bytes_per_token(settings) == pytest.approx(frames + 2 * per_token)
    assert crossing.bytes_per_token(fixed) == pytest.approx(frames)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**narrow("subspace", basis_update_every=2), "codec__backward": "int4+ef"},
        {**narrow("subspace", anchor="embedding", row_tokens=20, row_steps=5),
         "codec__rows": "fp64"},
    ],
    ids=["dense", "a basis that moves", "rows of the embedding"],
)  # fmt: skip
def test_a_stage_logs_no_more_than_is_planned(changes, make_settings, run_in_threads):
    settings = make_settings(**changes)
    outcome, planned = run_in_threads(settings), crossing.logged_bytes(settings, 4)
    for stage in range(2):
        sent = outcome.workers[stage]._ports[0].link.meter.sent_bytes()
        assert sent < planned
    assert planned < 4 * sent or changes, "and not much less"
    assert "logs: up to " in plan_text(make_plan(settings, RATE))
    assert "logs: " not in plan_text(make_plan(make_settings(train__log_mb=0), RATE))
