"""A hosted run that starts from weights: real processes on loopback, each with its own stage."""

from collections.abc import Callable

import pytest
from machines import Machines, assert_same_weights, machines  # noqa: F401

from thinwire.data import Corpus
from thinwire.settings import Settings
from trained import trained


@pytest.mark.slow
def test_peers_fetch_their_stage_of_the_weights_and_a_restarted_host_goes_on(
    machines: Machines,  # noqa: F811
    make_settings: Callable[..., Settings],
    corpus: Corpus,
) -> None:
    """They train to the weights of a run on one machine, though the origin is gone by then."""
    source = trained(make_settings(train__steps=2), corpus, machines.folder / "source")
    config = machines.config(train__steps=150, train__eval_every=0, train__checkpoint_every=15)
    start = ("--init-from", source)
    alone = machines.run(
        "alone", "train", config, *start, "--set", f"run.out={machines.folder / 'alone'}"
    )
    assert alone.wait() == 0, alone.text()
    host = machines.host(*start)
    peers = [machines.join(name) for name in ("ana", "ben")]
    host.wait_for(r"\[save\] +checkpoint of step", times=2)
    host.kill()
    source.rename(source.with_name("gone"))
    again = machines.host(*start)
    again.wait_for(r"epoch 2 from step [1-9]")
    assert again.wait() == 0, again.text()
    for peer in peers:
        assert peer.wait() == 0, peer.text()
    assert_same_weights(machines.run_folder, machines.folder / "alone" / "test", 150)
