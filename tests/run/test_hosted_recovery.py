"""Members of a hosted run that die, leave or are removed: others take their stages, nobody else
trains a step again, and the weights end as those of an undisturbed run.
"""

import json
import re

import pytest

from machines import assert_same_weights
from thinwire.run.alive import ask
from thinwire.run.formation import read_formation
from trained import trained
from waiting import PROCESS_PATIENCE, wait_until

# Steps without end, however slow others are to join.
RUN = {
    "pipeline__stages": 3, "train__steps": 100_000, "train__eval_every": 0,
    "train__checkpoint_every": 10,
}  # fmt: skip
SAVED = r"\[save\] +checkpoint of step \d+"


class Hosted:
    """A host with members that hold one stage each; and what is to be true at the end."""

    def __init__(self, machines, *names, **changes):
        self.machines, self.changes = machines, {**RUN, **changes}
        machines.config(**self.changes)
        self.host = machines.host()
        self.peers = {}
        for name in names:
            self.join(name)
        if names:
            self.host.wait_for(SAVED)

    def join(self, name, env=None):
        self.peers[name] = self.machines.join(name, env=env)
        return self.peers[name]

    @property
    def seats(self):
        """Who holds which stage, as the host has written down."""
        return read_formation(self.machines.run_folder).seats

    def held(self):
        """What its status says: which stages each member holds, and what it does."""
        peers = ask(self.machines.run_folder, {"ask": "status"})["peers"]
        return {peer["name"]: (peer["stages"], peer["state"]) for peer in peers}

    def has_spare(self, name):
        """Wait until a member is there that holds nothing."""
        wait_until(lambda: self.held().get(name, ([0], ""))[0] == [], PROCESS_PATIENCE)

    def goes_on(self, stage):
        self.host.wait_for(rf"stage {stage} is back after [\d.]+ s; no other stage trained a step")

    def ends_as_if_undisturbed(self, corpus):
        """Stop it: the weights are those of the chain in this process, each step came once, and
        there was one epoch.
        """
        host, run = self.host, self.machines.run_folder
        host.stop()
        steps = json.loads((run / "summary.json").read_text())["steps"]
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        done = [row["step"] for row in rows if row["kind"] == "step"]
        assert done == [*range(1, steps + 1)]
        assert re.findall(r"epoch (\d+)", host.text()) == ["1"], "the run was not formed again"
        alone = self.machines.folder / "alone"
        trained(self.machines.settings(**self.changes), corpus, alone, steps)
        assert_same_weights(run, alone, steps)


@pytest.mark.slow
def test_a_spare_takes_the_stage_of_who_is_killed_and_a_neighbour_that_of_who_is_removed(
    machines, corpus
):
    hosted = Hosted(machines, "ana", "ben", "cleo", "dan")
    host, (_, victim, removed) = hosted.host, hosted.seats
    (spare,) = {*hosted.peers} - {*hosted.seats}
    hosted.has_spare(spare)
    hosted.peers[victim].kill()
    host.wait_for(rf"stage 1: {spare}, ")
    hosted.goes_on(1)
    held = {name: stages for name, (stages, _) in hosted.held().items()}
    assert (held[spare], held[victim], held[removed]) == ([1], [], [2])
    kick = machines.run("host", "kick", removed, machines.run_folder)
    assert kick.wait() == 0 and "stage 2 gets another peer" in kick.text(), kick.text()
    host.wait_for(rf"stage 2: {spare}, ")
    hosted.goes_on(2)
    assert hosted.peers[removed].wait() != 0
    hosted.ends_as_if_undisturbed(corpus)
    for name in {*hosted.peers} - {removed, victim}:
        assert hosted.peers[name].wait() == 0, hosted.peers[name].text()


@pytest.mark.slow
def test_neighbours_that_die_together_are_held_by_who_is_left_until_one_is_back(machines, corpus):
    hosted = Hosted(machines, "ana", "ben", "cleo")
    host, (left, *killed) = hosted.host, hosted.seats
    for name in killed:
        hosted.peers[name].kill()
    for stage in (1, 2):
        host.wait_for(rf"stage {stage}: {left}, ")
        hosted.goes_on(stage)
    assert hosted.seats == [left] * 3
    hosted.join(killed[0])
    host.wait_for(rf"stage \d moves from {left} to {killed[0]}")
    host.wait_for(rf"stage \d: {killed[0]}, ")
    hosted.ends_as_if_undisturbed(corpus)
    assert sorted(hosted.seats) == sorted([left, left, killed[0]])


@pytest.mark.slow
def test_who_loses_its_process_stays_and_who_leaves_gives_its_stage_to_another(machines, corpus):
    hosted = Hosted(machines, "ana", "ben", "cleo", "dan")
    host, (leaves, _, again) = hosted.host, hosted.seats
    (spare,) = {*hosted.peers} - {*hosted.seats}
    hosted.has_spare(spare)
    hosted.peers[again].kill_children()
    host.wait_for(rf"stage 2: ({again}|{spare}), ")
    hosted.goes_on(2)
    left = hosted.peers[leaves]
    left.stop(code=0)
    assert "left the run" in left.text(), left.text()
    hosted.goes_on(0)
    assert leaves not in hosted.seats
    assert "the run stops after this step" not in host.text()
    hosted.ends_as_if_undisturbed(corpus)
