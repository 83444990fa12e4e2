"""What a host notes of a run under way, and how it chooses seats by what peers measured."""

from collections.abc import Callable

import pytest
from thinwire.remote.forming import form
from thinwire.remote.lobby import Guest
from thinwire.remote.messages import Arrive, StepNews
from thinwire.run.messages import LinkDown, Linked, LinkUp, Pulse

from thinwire.engine.reports import StageCosts, Step
from thinwire.report import LinkRecord, StepRecord
from thinwire.run.machine import Machine
from thinwire.run.status import Standing
from thinwire.settings import Settings

RUN = "0123456789abcdef"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def standing(clock: Clock) -> Standing:
    return Standing("code", RUN, "host", _now=clock)


def news(step: int, loss: float = 2.5) -> StepNews:
    return StepNews(step, 100, loss, 0.1, 1.0, 50, 700.0, 0.5, 9.0)


def test_a_wait_has_one_beginning_and_ends_with_a_step(standing: Standing, clock: Clock) -> None:
    standing.waits("2 more peers")
    clock.now += 30
    standing.waits("1 more peer")
    report = standing.report(0, [], [])
    assert (report.state, report.waiting_for) == ("waiting", "1 more peer")
    assert report.waiting_since == 1000.0 and report.time == 1030.0
    standing.forms()
    assert standing.report(0, [], []).waiting_for == ""
    standing.waits("a peer that prepares")
    standing.stepped(news(7))
    report = standing.report(1, [], [])
    assert (report.state, report.waiting_for, report.waiting_since) == ("training", "", 0.0)
    assert (report.step, report.steps, report.loss, report.tokens_per_s) == (7, 100, 2.5, 700.0)


def test_a_loss_that_is_not_finite_is_no_number(standing: Standing) -> None:
    standing.stepped(news(1, float("nan")))
    assert standing.report(1, [], []).loss is None


def test_links_and_words_of_stages(standing: Standing, clock: Clock) -> None:
    seats = ["ana", "ben", "cleo"]
    standing.heard(1, Linked("direct"))
    standing.heard(2, Linked("relayed"))
    links = [LinkRecord(1, 3000, 1000, 0.5)]
    standing.stepped(StepRecord(1, 9, 2.5, 0.1, 1.0, 50, 700.0, 2.0, 9.0, [], links))
    clock.now += 5
    standing.heard(1, Pulse(3, "computes F0 of step 2"))
    assert standing.last_word(1) == 1005.0 and standing.last_word(0) == 0.0
    assert standing.doing(1) == "computes F0 of step 2"
    first, second = standing.report(1, seats, []).links
    assert (first.below, first.above, first.way) == ("ana", "ben", "direct")
    assert (second.way, second.forward_bytes_per_s) == ("relayed", 1500.0)


def test_a_stage_is_where_its_last_step_left_it_until_it_says_more(standing: Standing) -> None:
    """Pulses come every few seconds, steps may come more often."""
    standing.heard(0, Pulse(3, "computes F0 of step 2"))
    costs = StageCosts(0.1, 0.1, 0.1)
    for done in (6, 7):
        report = Step(done, None, 0.1, 1.0, True, 0.0, 1.0, 0.0, costs, [], {}, {}, 0)
        standing.heard(0, report)
        assert standing.doing(0) == f"has done step {done + 1}"
    standing.heard(0, Pulse(9, "validates"))
    assert standing.doing(0) == "validates"


def test_a_link_that_is_down_is_what_the_run_waits_for(standing: Standing, clock: Clock) -> None:
    seats = ["ana", "ben"]
    standing.heard(1, Linked("direct"))
    standing.stepped(news(3))
    standing.heard(1, LinkDown(0, "no answer"))
    clock.now += 9
    report = standing.report(1, seats, [])
    assert report.waiting_for == "the link between ana and ben, which is down (no answer)"
    assert report.waiting_since == 1000.0 and report.links[0].way == ""
    standing.heard(1, LinkUp(0, 9.0, "relayed"))
    report = standing.report(1, seats, [])
    assert report.waiting_for == "" and report.links[0].way == "relayed", "the way may change"
    standing.forms()
    assert standing.report(2, seats, []).links[0].way == "", "nothing of an earlier epoch stays"


def guest(name: str, tflops: float, bf16: float = 0.0, memory_gb: float = 8.0) -> Guest:
    machine = Machine("", tflops, memory_gb, 50.0, 100.0, 5.0, bf16_tflops=bf16)
    return Guest(name, arrived=Arrive({}, machine, "", "", 0, 0, False))


def test_seats_follow_the_rate_in_which_a_run_computes(
    make_settings: Callable[..., Settings],
) -> None:
    here = [guest("ana", 1e-4, 1e-3), guest("ben", 1e-3, 1e-4)]
    for precision, fast in (("fp32", "ben"), ("bf16", "ana")):
        settings = make_settings(
            model__layers=8, run__precision=precision, codec__forward="bf16", codec__backward="bf16"
        )
        split = form(settings, here, RUN, str, False).split
        assert split is not None
        blocks = dict(zip([peer.name for peer in split.peers], split.counts, strict=True))
        assert max(blocks, key=lambda name: blocks[name]) == fast
        assert split.settings.pipeline.split == split.counts
        assert [crossing.is_relayed for crossing in split.crossings] == [True], "no door was found"


def test_peers_without_figures_count_as_equal(make_settings: Callable[..., Settings]) -> None:
    settings = make_settings()
    split = form(
        settings, [guest("ana", 0.0, memory_gb=0.0), guest("ben", 5.0)], RUN, str, False
    ).split
    assert split is not None and split.settings == settings.with_window()


def test_what_is_lacking_is_said(make_settings: Callable[..., Settings]) -> None:
    forming = form(
        make_settings(), [guest("a", 1, 1, 1e-5), guest("b", 1, 1, 1e-5)], RUN, str, False
    )
    assert forming.split is None and "no split fits" in forming.lacking
