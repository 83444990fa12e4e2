"""Who is blamed: the stage that failed first, whatever its neighbours complain of."""

import pytest
from leading import failed

from thinwire.run.conduct import blame
from thinwire.run.events import Exited, Lost, Said

LOST = Lost(1, "link control of stage 1 is broken")


def said(stage, *words, **blames):
    return Said(stage, failed(*words, **blames))


@pytest.mark.parametrize(("heard", "culprit"), [
    # a frozen stage is silent: its neighbours accuse it, theirs accuse them
    ([said(1, "cut-0", accuses=(0,))], 0),
    ([said(0, "cut-0", accuses=(1,)), Exited(0, 1)], 1),
    ([said(0, "b-0", accuses=(1,)), said(2, "b-1", accuses=(1,))], 1),
    ([said(2, "b-1", accuses=(1,)), said(1, "b-0", accuses=(0,))], 0),
    ([said(0, "b-0", accuses=(1,)), said(1, "b-1", accuses=(2,))], 2),
    ([said(2, "b-1", accuses=(1,)), LOST], 1),
    # a death without a word is the surest sign
    ([said(1, "b-0", accuses=(0,)), Exited(0, -9), Exited(1, 1)], 0),
    ([said(1, "b-0", accuses=(0,)), Exited(0, 1)], 0),
    ([said(0, "b-0", accuses=(1,)), LOST, Exited(1, -11)], 1),
    # whoever failed by itself says so, and its neighbours' complaints follow from that
    ([said(0, "b-0", accuses=(1,)), said(1, "x", "StageError"), Exited(1, 1)], 1),
    ([said(0, "b-0", accuses=(1,)), said(1, "x", "ValueError")], 1),
    # a frame outside the contract breaks the link at the end that objects
    ([said(0, "b-0", accuses=(1,)), said(1, "b-0: unexpected frame")], 1),
    # ... and says who sent it, whatever the sender complains of
    ([said(0, "b-0", accuses=(1,)), said(1, "b", "BreachError", convicts=(0,))], 0),
    ([said(1, "b", "BreachError", convicts=(0,)), Exited(1, 1)], 0),
    ([Lost(1, "a 'step' message has no field", in_breach=True), Exited(1, 1)], 1),
    ([Exited(0, 0), Exited(1, 3)], 1),
])  # fmt: skip
def test_the_stage_that_failed_first_is_blamed(heard, culprit):
    assert blame(heard).stage == culprit


@pytest.mark.parametrize(("code", "reason"), [(-9, "SIGKILL"), (-37, "signal 37"), (-743, "743")])
def test_signals_without_a_name_are_named_by_their_number(code, reason):
    """A peer on another machine may say any number."""
    assert blame([Exited(1, code)]).reason.endswith(reason)
