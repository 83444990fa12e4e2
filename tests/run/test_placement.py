"""The split over unlike peers: as good as trying all, and honest about memory."""

import dataclasses
import itertools
import json

import pytest

from thinwire.engine.build import stage_weights
from thinwire.errors import ConfigError
from thinwire.plan import block_memory, estimate_costs, make_plan
from thinwire.run import placement as pl
from thinwire.run.machine import Machine
from thinwire.schedule import simulate
from thinwire.typed import to_toml

UNIT = 1e8  # FLOP/s: compute and links of the tiny run then matter alike


def peer(name, rate=5.0, memory_mb=100.0, **other):
    figures = {"mbps_up": 20.0, "mbps_down": 30.0, "latency_ms": 5.0, "reachable": True, **other}
    return Machine(name, rate * UNIT / 1e12, memory_mb / 1e3, **figures)


def compositions(layers, stages):
    return [
        tuple(b - a for a, b in itertools.pairwise((0, *cuts, layers)))
        for cuts in itertools.combinations(range(1, layers), stages - 1)
    ]


def costs_of(settings, rates, *updates):
    """Of stages on machines that compute at rates of their own."""
    each = [estimate_costs(settings, rate, *updates) for rate in rates]
    forward, backward = (
        [getattr(costs, kind)[stage] for stage, costs in enumerate(each)]
        for kind in ("forward", "backward")
    )
    return dataclasses.replace(each[0], forward=forward, backward=backward)


def brute_force(settings, peers):
    """The shortest step of all placements that fit, by planner and simulator alone."""
    stages, best = settings.pipeline.stages, float("inf")
    for counts in compositions(settings.model.layers, stages):
        split = pl.with_split(settings, counts)
        held = make_plan(split, 1e9).simulation.schedule.held
        needs = [
            block_memory(split, blocks, stage_weights(split, stage), held[stage])
            for stage, blocks in enumerate(split.split())
        ]
        for order in itertools.permutations(peers, stages):
            if all(
                n <= pl.MEMORY_SHARE * p.memory_bytes for n, p in zip(needs, order, strict=True)
            ):
                costs = costs_of(split, [p.flops_per_s("fp32") for p in order])
                step = simulate(split.schedule(), costs, pl.links_of(list(order)), steps=2)
                best = min(best, step.step_seconds)
    return best


CASES = {
    "rates": [peer("a", 5), peer("b", 1), peer("c", 9)],
    "links": [peer("a", 2, mbps_up=1.0), peer("b", 5, reachable=False),
              peer("c", 3, latency_ms=60.0, reachable=False)],
    "memory": [peer("a", 9, 0.9), peer("b", 2), peer("c", 2, 1.1)],
    "spare": [peer("a", 5), peer("b", 1), peer("c", 9), peer("d", 4, mbps_up=3.0)],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_as_good_as_trying_all(case, make_settings):
    settings = make_settings(model__layers=7, pipeline__stages=3)
    found = pl.choose_split(settings, CASES[case])
    best = brute_force(settings, CASES[case])
    assert best <= found.simulation.step_seconds * (1 + 1e-9), "it fits, so it was tried too"
    assert found.simulation.step_seconds <= best * (1 + pl.WORTH + 0.01)
    assert pl.split_to_plain(found) == pl.split_to_plain(pl.choose_split(settings, CASES[case]))


@pytest.mark.parametrize("spread", [1.0, 1.2])
def test_equal_peers_train_as_one_machine_would(spread, make_settings):
    """Two measurements of one machine differ a little: the settings must not follow them."""
    settings = make_settings(model__layers=7, model__vocab=900, pipeline__stages=3)
    split = pl.choose_split(settings, [peer("a", 0.5), peer("b", 0.5 * spread), peer("c", 0.5)])
    assert split.settings.split() == settings.split() and split.settings.hash == settings.hash
    # The last stage has the head: who is a little faster may get it, and the settings stay.
    assert split.peers[-1].name == ("c" if spread == 1 else "b")
    assert "about equally fast" in split.why


def test_a_split_that_is_set_is_kept(make_settings):
    settings = make_settings(model__layers=6, pipeline__stages=3, pipeline__split=[1, 4, 1])
    split = pl.choose_split(settings, [peer("a", 9), peer("b", 1), peer("c", 2)])
    assert split.counts == [1, 4, 1] and split.settings.hash == settings.hash
    assert split.peers[1].name == "a", "the fastest peer has the largest stage"
    assert "pipeline.split is set" in split.why


def test_where_nothing_fits_the_search_is_short(make_settings, monkeypatch):
    settings = make_settings(model__layers=16, pipeline__stages=8, pipeline__microbatches=8,
                             train__batch=8)  # fmt: skip
    placed, place = [], pl.Search.place
    monkeypatch.setattr(pl.Search, "place", lambda *what: placed.append(what) or place(*what))
    with pytest.raises(ConfigError, match="no split fits"):
        pl.choose_split(settings, [peer(f"p{n}", n, memory_mb=0.4 + 0.1 * n) for n in range(1, 9)])
    assert len(placed) < 8**3


def test_where_nothing_fits_it_says_what_is_lacking(make_settings):
    settings = make_settings(model__layers=6, pipeline__stages=2)
    peers = [peer("a", memory_mb=0.7), peer("b", memory_mb=0.7)]
    with pytest.raises(ConfigError, match=r"no split fits.* it lacks .* more memory on"):
        pl.choose_split(settings, peers)
    fixed = make_settings(model__layers=6, pipeline__stages=2, pipeline__split=[5, 1])
    with pytest.raises(ConfigError, match=r"pipeline\.split = \[5, 1\] does not fit"):
        pl.choose_split(fixed, peers)
    with pytest.raises(ConfigError, match=r"only 2 peers.*Add 1, or set pipeline\.stages = 2"):
        pl.choose_split(make_settings(pipeline__stages=3), peers)


@pytest.mark.parametrize("changes", [
    {},
    {"boundary__mode": "projected", "boundary__rank": 5, "boundary__anchor": "per-stage"},
    {"boundary__mode": "reparam", "boundary__rank": 3, "boundary__free_layers": 1},
    {"lora__rank": 2, "run__precision": "bf16"},
], ids=["dense", "table", "reparam", "lora"])  # fmt: skip
def test_looked_up_figures_are_the_planners(changes, make_settings):
    settings = make_settings(model__layers=6, pipeline__stages=3, **changes)
    machines = [peer(name, rate, mupdates=7.0) for name, rate in (("a", 3), ("b", 4), ("c", 5))]
    figures = pl.StageFigures(settings, machines)
    for counts in compositions(6, 3):
        split = pl.with_split(settings, counts)
        plan = make_plan(split, 1e9)
        stages = list(enumerate(pl.ranges(counts)))
        assert [figures.weights(*stage).count for stage in stages] == plan.parameters
        assert [figures.memory(*stage) for stage in stages] == plan.memory_bytes
        costs = figures.costs((2, 0, 1), counts)
        planned = costs_of(split, [5 * UNIT, 3 * UNIT, 4 * UNIT], 7e6)
        assert costs.update == pytest.approx(planned.update) and all(planned.update)
        assert costs.forward == pytest.approx(planned.forward)
        assert costs.backward == pytest.approx(planned.backward)


def test_unconstrained_blocks_stay_on_the_last_stage(make_settings):
    """Another split must not change what is trained."""
    settings = make_settings(
        model__layers=8, pipeline__stages=2, boundary__mode="reparam", boundary__rank=3,
        boundary__free_layers=3,
    )  # fmt: skip
    split = pl.choose_split(settings, [peer("fast", 40), peer("slow", 1)])
    assert split.counts[-1] >= 3
    assert split.settings.resolved().boundary == settings.boundary


def test_an_open_window_is_the_fastest_that_fits_the_peers(make_settings):
    """Two peers far away: more in flight hide the delay, as far as their memory goes."""

    def chosen(window, memory_mb=100.0):
        far = [peer(name, 50, memory_mb, latency_ms=50.0) for name in "ab"]
        settings = {"pipeline__microbatches": 16, "train__batch": 16, "pipeline__window": window}
        return pl.choose_split(make_settings(**settings, model__context=64), far)

    split = chosen(-1)
    assert split.settings.pipeline.window == 8, "four times the stages: nothing wider is tried"
    assert split.simulation.step_seconds == chosen(8).simulation.step_seconds
    needs = max(chosen(4).memory_bytes) / pl.MEMORY_SHARE / 1e6
    assert max(chosen(8).memory_bytes) / 1e6 > needs
    poor = chosen(-1, needs * 1.001)
    assert poor.settings.pipeline.window == 4 and poor.counts == split.counts
    near = pl.choose_split(
        make_settings(), [peer("a", 1, latency_ms=0.1), peer("b", 1, latency_ms=0)]
    )
    assert near.settings.pipeline.window == 2, "no delay to hide: the least memory"
    with pytest.raises(ConfigError, match="no split fits"):
        chosen(-1, 0.01)


def test_the_command(make_settings, tmp_path, command):
    config, listed = tmp_path / "run.toml", tmp_path / "peers.toml"
    config.write_text(to_toml(make_settings(model__layers=6)))
    listed.write_text(
        "".join(
            f'[[peer]]\nname = "{name}"\ntflops = {rate}\nmemory_gb = 1\nmbps_up = 10\n'
            for name, rate in (("ana", 0.005), ("ben", 0.001))
        )
    )
    _, text, _ = command("plan", config, "--peers", listed)
    assert "ana - ben (relayed: neither can be reached), per step:" in text or "ben - ana" in text
    for part in ("why: ", "estimate: ", " / 1.0 GB"):
        assert part in text
    plain = json.loads(command("plan", config, "--peers", listed, "--json")[1])
    assert sum(plain["split"]) == 6 and plain["links"][0]["relayed"] is True
    assert plain["stages"][0]["memory_bytes"] < plain["stages"][0]["peer_memory_bytes"]
    code, _, said = command("plan", config, "--peers", listed, "--tflops", 1)
    assert code and "contradict" in said
