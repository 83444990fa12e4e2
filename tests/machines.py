"""A host and its peers as real processes that share no folder: each has a home of its own."""

import glob
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from programs import Program
from thinwire.schedule import split_layers
from thinwire.typed import to_toml
from whole_state import are_equal


class Machine(Program):
    """A `thinwire` process with a home, a cache and a data folder that no other has."""

    def __init__(self, home, *arguments, said="", env=None):
        home.mkdir(parents=True, exist_ok=True)
        self.home, words = home, [*map(str, arguments)]
        own: dict[str, Any] = {"HOME": home, "THINWIRE_DATA": home / "data", **(env or {})}
        super().__init__(words, home / "cache", home, said=said, **own)

    def kill_children(self):
        """Kill the processes that it has started."""
        children = f"/proc/{self.process.pid}/task/*/children"
        pids = [pid for path in glob.glob(children) for pid in Path(path).read_text().split()]
        assert pids, "it has started none"
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)

    def kill(self):
        self.process.kill()
        self.process.wait()


class Machines:
    """Starts machines, and ends those that are left."""

    def __init__(self, folder, make_settings):
        self.folder, self._make_settings = folder, make_settings
        self.started: list[Machine] = []
        self.invite = ""

    def settings(self, **changes):
        """Settings of a run, as a host's run.toml has them."""
        stages = split_layers(4, [], changes.get("pipeline__stages", 2))
        defaults: dict[str, object] = {
            "run__precision": "fp32",
            "codec__forward": "bf16",
            "codec__backward": "bf16",
            "run__out": str(self.folder / "host" / "runs"),
            "train__checkpoint_every": 2,
            "link__outage": 20.0,
            # Peers that share a loaded machine measure unlike rates; what is trained must not vary.
            "pipeline__split": [len(blocks) for blocks in stages],
        }
        return self._make_settings(**{**defaults, **changes})

    def config(self, **changes):
        """A run.toml on the host's machine."""
        path = self.folder / "host" / "run.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(to_toml(self.settings(**changes)))
        return path

    def host(self, *arguments):
        """Start the host; its invite is then that of `join`."""
        command = ("host", self.folder / "host" / "run.toml", "--listen", "127.0.0.1:0")
        machine = self._start("host", *command, "--machines", 9, *arguments)
        machine.wait_for(r"thinwire join tw1-\S+")
        self.invite = re.findall(r"tw1-\S+", machine.text())[-1]
        return machine

    def join(self, name, *arguments, env=None):
        """Start a peer; it reads the invite from its input, as no other process should see it."""
        words = ("join", "-", "--name", name, "--listen", "127.0.0.1:0", *arguments)
        return self._start(name, *words, said=self.invite, env=env)

    def run(self, home, *arguments):
        """Start any command on a machine."""
        return self._start(home, *arguments)

    def _start(self, home, *arguments, said="", env=None):
        self.started.append(Machine(self.folder / home, *arguments, said=said, env=env))
        return self.started[-1]

    def close(self):
        for machine in self.started:
            if machine.process.poll() is None:
                machine.kill()

    @property
    def run_folder(self):
        return self.folder / "host" / "runs" / "test"


@pytest.fixture
def machines(tmp_path, make_settings):
    made = Machines(tmp_path, make_settings)
    yield made
    made.close()


def weights(run, step):
    """All tensors of a checkpoint, whichever file they are in."""
    files = sorted((run / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
    assert files, f"no checkpoint of step {step} in {run}"
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_weights(one, other, step):
    assert are_equal(weights(one, step), weights(other, step))
