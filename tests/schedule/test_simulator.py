"""Cases whose step can be worked out by hand."""

import dataclasses
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import ConfigError
from thinwire.schedule import Costs, Links, build, simulate, window_table
from thinwire.schedule.simulator import CONTROL_BYTES, ROW_FRAME_BYTES, Span


def slower_or_equal(steps):
    return all(later >= earlier - SLACK for earlier, later in pairwise(steps))


MBPS = 8.0  # one megabyte per second, so that a byte takes a microsecond
BYTES = 500_000
TRANSFER = 0.5
CONTROL = CONTROL_BYTES / 1e6


def costs(stages, forward=1.0, backward=2.0, update=0.5, size=0):
    sizes = [size] * (stages - 1)
    return Costs([forward] * stages, [backward] * stages, [update] * stages, sizes, sizes)


def lane(simulation, stage, name):
    return [s for s in simulation.spans if s.stage == stage and s.lane == name]


@pytest.mark.parametrize(("name", "delayed"), [("gpipe", False), ("1f1b", False), ("1f1b", True)])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 5), (2, 2), (3, 7), (4, 8), (6, 12)])
def test_free_links_leave_only_the_bubble_of_the_pipeline_and_none_with_delay(
    name, delayed, stages, microbatches
):
    """Of one stage: the sum of its work."""
    schedule = build(name, stages, microbatches, delay=microbatches if delayed else 0)
    step = simulate(schedule, costs(stages))
    work = microbatches * 3.0 + 0.5
    expected = work + (0 if delayed else (stages - 1) * 3.0)
    assert step.step_seconds == pytest.approx(expected)
    assert step.bubble_fraction == pytest.approx(1 - work / expected)
    assert step.bound == "compute of stage 0" or (stages > 1 and not delayed)


def test_one_microbatch_crosses_and_returns():
    """Equal rates up and down count once, latency once per crossing.

    The tally follows the gradient while stage 0 still computes, so it costs nothing here.
    """
    network = Links.alike(2, MBPS, MBPS, latency_s=0.25)
    step = simulate(build("gpipe", 2, 1), costs(2, size=BYTES), network)
    assert step.step_seconds == pytest.approx(2 * (1.0 + 2.0) + 2 * (TRANSFER + 0.25) + 0.5)


def test_link_bound_1f1b_uses_both_directions_at_once():
    network = Links.alike(2, MBPS, MBPS, latency_s=0.1)
    step = simulate(build("1f1b", 2, 20, 20), costs(2, 0, 0, 0.5, BYTES), network)
    assert step.step_seconds == pytest.approx(21 * TRANSFER + CONTROL + 2 * 0.1 + 0.5)
    busy = (20 * TRANSFER + CONTROL) / step.step_seconds
    assert step.uplink_utilisation[0] == pytest.approx(busy)
    assert step.bound == "uplink of stage 0"


def test_a_middle_uplink_carries_forwards_and_backwards_in_turn():
    """Only what leaves stage 1 has a size: three forwards up, three backwards down, one link."""
    middle = Costs([0.0] * 3, [0.0] * 3, [0.0] * 3, [0, BYTES], [BYTES, 0])
    step = simulate(build("1f1b", 3, 3), middle, Links.alike(3, MBPS, 0))
    # Verdicts of stages 0 and 1 leave before the first forward, the tally after the last backward.
    assert step.step_seconds == pytest.approx(6 * TRANSFER + 3 * CONTROL)
    sends = [s.label for s in lane(step, 1, "send")]
    assert sends == ["F0>", "F1>", "<B0", "F2>", "<B1", "<B2", "<tally", "verdict>"]
    assert step.bound == "uplink of stage 1"


def test_latency_bound_one_microbatch_at_a_time():
    step = simulate(build("1f1b", 3, 5, window=1), costs(3), Links.alike(3, latency_s=10.0))
    assert step.step_seconds == pytest.approx(5 * (3 * 3.0 + 4 * 10.0) + 0.5)
    assert step.bound == "latency"
    assert step.chain == pytest.approx({"compute": 45.5, "shared": 0, "latency": 200, "links": 0})


@pytest.mark.parametrize(("network", "cores", "bound"), [
    (Links.alike(4, latency_s=0.4), 2.0, "compute shared by all stages"),
    (Links.alike(4, latency_s=0.4), None, "compute"),
    (Links.alike(4, latency_s=9.0), 2.0, "latency"),
    (Links.alike(4, MBPS, latency_s=0.4), None, "links"),
])  # fmt: skip
def test_where_nothing_is_busy_the_longest_chain_names_the_limit(network, cores, bound):
    """On two cores stages wait for each other's compute: a short delay does not decide."""
    sizes, window = (costs(4, size=BYTES * 6), 1) if bound == "links" else (costs(4), 4)
    step = simulate(build("1f1b", 4, 4, window), sizes, network, cores=cores)
    assert step.bound == bound
    assert sum(step.chain.values()) == pytest.approx(step.step_seconds)
    assert (step.chain["shared"] > 0) == (cores is not None and bound != "latency")


def test_a_wider_window_hides_latency():
    """Eight in flight cover the round trip once; two at a time pay it four times.

    Of a pair, the second trails the first by one forward and one backward.
    """
    network = Links.alike(2, latency_s=10.0)
    free_top = Costs([1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0], [0])
    wide = simulate(build("1f1b", 2, 8, 8), free_top, network)
    assert wide.step_seconds == pytest.approx(1.0 + 20.0 + 8 * 1.0)
    narrow = simulate(build("1f1b", 2, 8, 2), free_top, network)
    assert narrow.step_seconds == pytest.approx(4 * (1.0 + 20.0 + 1.0) + 2.0)


def test_the_bubble_is_the_time_in_which_stages_do_not_compute():
    """One microbatch: 1 + 2 s of passes on each stage in turn, then both updates at half speed."""
    step = simulate(build("gpipe", 2, 1), costs(2), cores=1)
    assert step.step_seconds == pytest.approx(1 + 1 + 2 + 2 + 1)
    assert step.bubble_fraction == pytest.approx(1 - (1 + 2 + 1) / 7)


def test_running_actions_share_the_cores_equally():
    uneven = Costs([1.0, 3.0], [1.0, 1.0], [0.0, 0.0], [0], [0])
    step = simulate(build("gpipe", 2, 2), uneven, cores=1)
    assert lane(step, 0, "compute")[:2] == [
        Span(0, "compute", "F0", 0.0, 1.0),
        Span(0, "compute", "F1", 1.0, 3.0),  # at half speed beside the forward of stage 1
    ]
    assert lane(step, 1, "compute")[0] == Span(1, "compute", "F0", 1.0, 5.0)


def test_the_window_table_trades_memory_for_time():
    links = Links.alike(4, latency_s=5.0)
    table = window_table(4, 16, costs(4), links)
    windows, seconds, held = zip(*table, strict=True)
    assert windows == (1, 2, 4, 6, 9, 13, 16)
    assert held[2] == [4, 3, 2, 1]
    assert seconds[0] > seconds[2] > seconds[-1]
    assert all(count[0] == window for window, count in zip(windows, held, strict=True))
    with_cores = window_table(4, 16, costs(4), links, cores=1)
    assert all(b[1] >= a[1] for a, b in zip(table, with_cores, strict=True))


@pytest.mark.parametrize(("changes", "message"), [
    ({"costs": costs(3)}, r"costs.forward = .*: 2 numbers are needed"),
    ({"costs": costs(2, forward=-1.0)}, r"costs.forward = \[-1.0, -1.0\]: .* 0 or more"),
])  # fmt: skip
def test_what_cannot_be_simulated(changes, message):
    arguments = {"schedule": build("gpipe", 2, 2), "costs": costs(2)} | changes
    with pytest.raises(ConfigError, match=message):
        simulate(**arguments)


@pytest.mark.parametrize("frames", [1, 8])
def test_rows_of_a_shared_embedding_are_handed_on_frame_by_frame(frames):
    """Down three cuts and up again; a stage sends on what it has while the rest still comes."""
    size, rate = frames * ROW_FRAME_BYTES, 80.0
    free = Costs([0.0] * 4, [0.0] * 4, [0.0] * 4, [0] * 3, [0] * 3)
    shared = dataclasses.replace(free, row_bytes=[size] * 3)
    schedule, network = build("gpipe", 4, 2), Links.alike(4, rate, rate)
    simulation = simulate(schedule, shared, network)
    more = simulation.step_seconds - simulate(schedule, free, network).step_seconds
    frame_s = ROW_FRAME_BYTES * 8 / rate / 1e6
    assert more == pytest.approx((2 * (frames + 2)) * frame_s, rel=0.01)
    labels = [span.label for span in simulation.spans if "row" in span.label]
    sent = Counter(label.rstrip("0123456789> ") for label in labels)
    assert sent == {"<row gradients": 3 * frames, "rows": 3 * frames}


@pytest.mark.parametrize(("microbatches", "window", "delay", "expected"), [
    # Way up and back: four actions of a second, two of ten seconds. In flight are all that a
    # step has, so each begins when the one a step before is back; or, without delay, when the
    # last one is: two seconds later for each, since the upper stage does them in turn.
    (2, 2, 2, 24.0),
    (2, 2, 0, 26.0),
    (4, 4, 4, 24.0),
    (4, 4, 0, 30.0),
    (4, 2, 4, 48.0),  # half of them in flight: twice there and back
    (40, 40, 40, 80.0),  # there is work for all of that time
])  # fmt: skip
def test_a_step_with_delay_is_the_way_there_and_back(microbatches, window, delay, expected):
    schedule = build("1f1b", 2, microbatches, window, delay)
    step = simulate(schedule, costs(2, 1.0, 1.0, 0.0), Links.alike(2, latency_s=10.0))
    assert step.step_seconds == pytest.approx(expected)
    assert sum(step.chain.values()) == pytest.approx(expected)


def test_the_verdict_hides_behind_the_next_step():
    """An update waits for a verdict that comes over all cuts, but has a whole step for that."""
    stages, network = 4, Links.alike(4, latency_s=1.0)
    long = simulate(build("1f1b", stages, 16, 16, delay=16), costs(stages), network)
    assert long.step_seconds == pytest.approx(16 * 3.0 + 0.5)
    drained = simulate(build("1f1b", stages, 16, 16), costs(stages), network)
    assert drained.step_seconds >= long.step_seconds + 2 * (stages - 1) * (1.0 + 1.0)


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


@settings(max_examples=80)
@given(pipelines(), rates, rates, latencies, st.sampled_from([None, 1, 2]))
def test_no_step_is_shorter_than_its_busiest_resource(pipeline, up, down, latency, cores):
    schedule, costs = pipeline
    step = simulate(schedule, costs, Links.alike(schedule.stages, up, down, latency), cores=cores)
    assert step.step_seconds >= max(step.compute_seconds) - SLACK
    assert step.step_seconds >= sum(step.compute_seconds) / (cores or schedule.stages) - SLACK
    assert max(step.uplink_utilisation) <= 1 + SLACK
    assert max(step.downlink_utilisation) <= 1 + SLACK
    assert -SLACK <= step.bubble_fraction <= 1
    for lane in ("compute", "send"):
        for stage in range(schedule.stages):
            spans = [s for s in step.spans if (s.stage, s.lane) == (stage, lane)]
            assert all(a.end <= b.start + SLACK for a, b in pairwise(spans))


@settings(max_examples=80)
@given(pipelines(), rates, latencies)
def test_with_delay_no_step_is_longer_where_the_window_is_that_of_1f1b(pipeline, rate, latency):
    """A smaller window has stages wait for each other in a circle, an update that is longer than
    all else holds up what would be sent, and a downlink with a limit delivers what comes from above
    and below in another order: then it may be.
    """
    schedule = pipeline[0]
    costs = dataclasses.replace(pipeline[1], update=[0.0] * schedule.stages)
    count = schedule.microbatches, max(schedule.window, schedule.stages)
    both = [build("1f1b", schedule.stages, *count, delay) for delay in (0, count[0])]
    links = Links.alike(schedule.stages, rate, 0, latency)
    most, found = (simulate(one, costs, links).step_seconds for one in both)
    assert found <= most * (1 + SLACK) + SLACK


@settings(max_examples=40)
@given(pipelines(), rates, latencies)
def test_worse_links_never_help_while_downlinks_are_unlimited(pipeline, rate, latency):
    """Every queue then has one sender in a fixed order, so a delay can only be passed on."""

    def seconds(up, delay):
        links = Links.alike(pipeline[0].stages, up, 0, delay)
        return simulate(*pipeline, links).step_seconds

    assert slower_or_equal([seconds(rate, worse) for worse in (0, 0.3, 2)])
    assert slower_or_equal([seconds(up, latency) for up in (0, 50, 4, 0.5)])
