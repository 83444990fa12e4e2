"""What must hold for any costs and links; and one thing that does not."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.schedule import Costs, Network, build, simulate

seconds = st.sampled_from([0.0, 0.125, 0.5, 1.0, 3.0])
sizes = st.sampled_from([0, 1000, 125_000, 500_000])
rates = st.sampled_from([0.0, 0.5, 1.0, 8.0, 100.0])
latencies = st.sampled_from([0.0, 0.01, 0.4, 2.0])
SLACK = 1e-6


@st.composite
def pipelines(draw, max_stages=4):
    stages = draw(st.integers(1, max_stages))
    microbatches = draw(st.integers(stages, 6))
    name = draw(st.sampled_from(["gpipe", "1f1b", "1f1b"]))
    window = draw(st.integers(1, microbatches)) if name == "1f1b" else 0
    per_stage = st.lists(seconds, min_size=stages, max_size=stages)
    per_cut = st.lists(sizes, min_size=stages - 1, max_size=stages - 1)
    costs = Costs(draw(per_stage), draw(per_stage), draw(per_stage), draw(per_cut), draw(per_cut))
    return build(name, stages, microbatches, window), costs


def slower_or_equal(steps):
    return all(later >= earlier - SLACK for earlier, later in pairwise(steps))


@settings(max_examples=80, deadline=None)
@given(pipelines(), rates, rates, latencies, st.sampled_from([None, 1, 2]))
def test_no_step_is_shorter_than_its_busiest_resource(pipeline, up, down, latency, cores):
    schedule, costs = pipeline
    step = simulate(schedule, costs, Network(up, down, latency), cores=cores)
    assert step.step_seconds >= max(step.compute_seconds) - SLACK
    assert step.step_seconds >= sum(step.compute_seconds) / (cores or schedule.stages) - SLACK
    assert max(step.uplink_utilisation) <= 1 + SLACK
    assert max(step.downlink_utilisation) <= 1 + SLACK
    assert -SLACK <= step.bubble_fraction <= 1
    for lane in ("compute", "send"):
        for stage in range(schedule.stages):
            spans = [s for s in step.spans if (s.stage, s.lane) == (stage, lane)]
            assert all(a.end <= b.start + SLACK for a, b in pairwise(spans))


@settings(max_examples=40, deadline=None)
@given(pipelines(), rates)
def test_more_latency_never_helps_while_downlinks_are_unlimited(pipeline, up):
    """Every queue then has one sender in a fixed order, so a delay can only be passed on."""
    steps = [simulate(*pipeline, Network(up, 0, latency)).step_seconds for latency in (0, 0.3, 2)]
    assert slower_or_equal(steps)


@settings(max_examples=40, deadline=None)
@given(pipelines(), latencies)
def test_a_slower_uplink_never_helps_while_downlinks_are_unlimited(pipeline, latency):
    steps = [simulate(*pipeline, Network(up, 0, latency)).step_seconds for up in (0, 50, 4, 0.5)]
    assert slower_or_equal(steps)


@settings(max_examples=40, deadline=None)
@given(pipelines(max_stages=2), latencies)
def test_two_stages_are_monotone_with_downlinks_too(pipeline, latency):
    """With two stages each downlink has a single sender as well."""
    steps = [simulate(*pipeline, Network(8, down, latency)).step_seconds for down in (0, 9, 4, 1)]
    assert slower_or_equal(steps)


def test_three_stages_on_shared_downlinks_are_not_monotone():
    """First come first served: a delay can let the message that matters go first."""
    costs = Costs([2.0, 2.0, 0.0], [3.0, 3.0, 0.0], [0.0] * 3, [500_000, 125_000], [0, 375_000])
    schedule = build("1f1b", 3, 4, 4)
    quick = simulate(schedule, costs, Network(1, 1, 0.0)).step_seconds
    delayed = simulate(schedule, costs, Network(1, 1, 0.5)).step_seconds
    assert delayed < quick


@settings(max_examples=20, deadline=None)
@given(pipelines(), rates, latencies)
def test_the_same_input_gives_the_same_spans(pipeline, rate, latency):
    network = Network(rate, rate, latency)
    assert simulate(*pipeline, network) == simulate(*pipeline, network)
