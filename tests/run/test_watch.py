"""Who is waited for, and since when."""

import pytest

from thinwire.run.watch import Watch


class Stuck(Exception):
    """The watch has named who is stuck."""


class Wait:
    """A watch of two stages whose clock is turned by hand."""

    def __init__(self, patience=100.0):
        self.now = 0.0
        self.watch = Watch(2, patience)
        self.watch.pass_time(self.now)
        self.watch.result()

    def let(self, seconds, **doing):
        """Time goes by while stages say that they still do the same; what a person is told."""
        told = []
        for _ in range(round(seconds)):
            self.now += 1.0
            self.watch.pass_time(self.now)
            for stage, what in doing.items():
                self.watch.heard(int(stage[-1]), 1, what)
            told.append(self.watch.complaint())
            verdict, _ = self.watch.verdict()
            if verdict:
                raise Stuck(verdict)
        return [text for text in told if text]


WAITS = {"stage_0": "waits for B0 of step 3", "stage_1": "waits for F0 of step 3"}


def test_a_long_wait_is_told_each_time_that_it_has_doubled():
    first, second = Wait().let(99, **WAITS)
    assert first.startswith("no progress for 30 s:") and second.startswith("no progress for 60 s:")
    assert "stage 1 waits for F0 of step 3, for 30 s" in first and "silent" not in first
    assert len(Wait(patience=0.0).let(5000, **WAITS)) == 8, "without patience there is no end"


@pytest.mark.parametrize(("doing", "words"), [
    ({"stage_0": "waits for B0 of step 3"}, r"stage 1 is stuck: .* silent for"),
    ({**WAITS, "stage_0": "computes B0 of step 3"}, "stage 0 is stuck: .* 0 computes B0"),
    (WAITS, "the stages wait for each other: .*waits for B0 .*waits for F0"),
])  # fmt: skip
def test_the_stage_that_is_stuck_is_named(doing, words):
    with pytest.raises(Stuck, match=words + r".*run\.patience \(now 100 s"):
        Wait().let(110, **doing)


def test_a_wait_may_be_ten_times_the_longest_so_far():
    wait = Wait(patience=10.0)
    wait.watch.result()
    wait.let(9, **WAITS)
    wait.watch.heard(0)
    wait.let(75, **WAITS)
    with pytest.raises(Stuck):
        wait.let(30, **WAITS)


def test_a_stage_that_has_finished_is_not_waited_for():
    wait = Wait()
    wait.watch.dismiss(0)
    wait.watch.dismiss(1)
    assert wait.let(500) == []


def test_time_that_the_coordinator_was_suspended_does_not_count():
    wait = Wait()
    wait.let(20, **WAITS)
    wait.now += 36_000
    assert wait.let(5, **WAITS) == []


def test_a_stage_that_claims_to_work_while_all_others_wait_is_named():
    """Its pulses would be progress for ever."""
    wait, begun = Wait(), 1
    with pytest.raises(Stuck, match=r"stage 1 is stuck: .* says that it works, and no other stage"):
        for _ in range(200):
            begun += 1
            wait.let(1, stage_0="waits for B0 of step 3")
            wait.watch.heard(1, begun, "computes F0 of step 3")
    assert 100 <= wait.now <= 103


def test_a_step_that_takes_far_longer_than_those_before_is_told_and_at_last_ends_the_run():
    wait, begun, told = Wait(patience=100.0), 1, []
    for _ in range(3):
        wait.let(20, **WAITS)
        for stage in (0, 1):
            wait.watch.heard(stage)
        wait.watch.result()
    with pytest.raises(Stuck, match=r"no step has ended for 1000 s"):
        for _ in range(2000):
            begun += 1
            told += wait.let(1)
            for stage in (0, 1):
                wait.watch.heard(stage, begun, "is busy")
    said = [f"no step has ended for {seconds} s" for seconds in (100, 200, 400, 800)]
    assert [text.split(",")[0] for text in told] == said
    assert "the longest so far took 20 s: stage 0 is busy" in told[0]


def test_a_link_that_is_down_is_waited_for_as_long_as_it_may_be():
    """However short the patience: the link ends the run first, and says more."""
    wait = Wait(patience=10.0)
    wait.watch._outage = 60.0
    wait.watch.down("cut-0", True)
    wait.let(85, **WAITS)
    wait.watch.down("cut-0", False)
    wait.let(9, **WAITS)  # what waited for it waits anew
    with pytest.raises(Stuck):
        wait.let(2, **WAITS)


def test_a_stage_far_away_is_silent_only_if_it_was_not_so_before():
    def silent(pulse_every):
        wait = Wait(patience=1000.0)
        for _ in range(8):
            wait.let(pulse_every)
            for stage in (0, 1):
                wait.watch.heard(stage, 1, "works")
        wait.let(30)
        return "silent" in "".join(wait.watch.doing())

    assert silent(pulse_every=5) and not silent(pulse_every=20)


def silence(wait, seconds, every, who="stage_0"):
    """Who is frozen after so long, if one stage speaks every second and the other so often."""
    for second in range(seconds):
        wait.let(1, **{who: "works"}, **({} if second % every else {"stage_1": "works"}))
    return wait.watch.frozen()


def test_a_stage_is_frozen_after_several_of_its_own_pauses_and_never_where_nobody_speaks():
    wait = Wait(900.0)
    assert not silence(wait, 30, every=5)
    assert not silence(wait, 20, every=100) and wait.let(3, stage_0="works") == []
    assert list(wait.watch.frozen()) == [1], "which spoke 23 s ago, and every 5 s before"
    slow = Wait(900.0)
    assert not silence(slow, 120, every=15), "its machine is loaded"
    assert not silence(slow, 50, every=100) and list(silence(slow, 20, every=100)) == []
    assert list(silence(Wait(900.0), 25, every=100)) == [1]
    alone = Wait(900.0)
    silence(alone, 10, every=5)
    alone.let(100)
    assert not alone.watch.frozen(), "perhaps this process was not heard, or the machine was away"
    away = Wait(900.0)
    away.watch.down("control-1", True)
    assert not silence(away, 60, every=100), "the way to it is known to be down"
