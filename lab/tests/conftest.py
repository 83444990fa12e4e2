"""A small corpus and small settings; logs of arms that nobody trained: losses by a formula."""

import importlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from settings_values import TINY_MODEL, tiny_settings, write_texts
from thinwire.data import DataConfig, prepare
from thinwire_lab.arms import ground_of, recipe_grid, with_rates

BASE = {
    "model": {"preset": "tiny", "layers": 8},
    "pipeline": {"microbatches": 2, "window": 2, "schedule": "gpipe"},
    "train": {"batch": 16},
}
RATIOS = {"dense": 1.0, "thin32": 26.0, "thin100": 68.0}
"""From label, tokens and seed to a validation loss."""


# A small run of each experiment, and what the guarantees name; `make bench` has the rest.
SMOKE = {
    "test_lossless.py": ("test_float64_cuts_change_nothing", "test_the_report_is_written"),
    "test_optimizer.py": ("test_the_report_is_written",),
    "test_bandwidth.py": ("test_every_rank_is_measured_and_what_measurements_override_is_refused",),
    "test_arms.py": ("test_recipes_are_compared",),
    "test_codecs.py": ("test_a_study_of_language", "test_a_study_of_images"),
    "test_gap.py": ("test_one_command_draws_logs_beside_the_literature",),
    "test_headline.py": ("test_time_is_simulated_seconds_times_measured_steps",),
    "test_images.py": ("test_a_resnet_trains_to_the_same_bits_wherever_it_is_cut",),
    "test_bench.py": ("test_every_case_can_be_run",),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != Path(__file__).parent or item.path.name == "test_options.py":
            continue
        if item.name.partition("[")[0] not in SMOKE.get(item.path.name, ()):
            item.add_marker("slow")


class NoData:
    """What names the data of a ground."""

    fingerprint = "none"
    folder = Path("none")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Prepared data, once for all tests of a process."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["THINWIRE_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """A folder of small distinct documents."""
    return write_texts(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def corpus(text_folder, cache):
    config = DataConfig(source="text", path=str(text_folder), valid_fraction=0.1)
    return prepare(config, TINY_MODEL["vocab"], cache)


@pytest.fixture
def make_settings(tmp_path, text_folder):
    """Settings of a tiny exact run; `section__key=value` changes one key."""
    return lambda **changes: tiny_settings(tmp_path, text_folder, changes)


@pytest.fixture
def in_this_process(monkeypatch, tmp_path):
    """Arms are trained here, one after the other: processes take seconds to start."""
    trained: list[str] = []

    class Here:
        def __init__(self, arm, ground, processes):
            self.arm = arm
            trained.append(f"{arm.label}  seed {arm.seed}")
            train = importlib.import_module(ground.trainer).train
            self.figures = json.dumps(train(arm, {**ground.shared, "processes": 1}))

        def poll(self):
            return 0

        def found(self):
            return json.loads(self.figures), "", ""

    monkeypatch.setattr("thinwire_lab.pool._Process", Here)
    monkeypatch.setattr("thinwire_lab.pool._POLL_SECONDS", 0)
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    return trained


@pytest.fixture
def write_log(tmp_path):
    """Writes convergence.jsonl with recipes of several lengths, whose curves follow the losses."""

    def write(loss, lengths, seeds=(0,), stages=4):
        base = with_rates(BASE)
        lines = []
        for steps in lengths:
            arms = recipe_grid("thin32,thin100", base, [0.02], [stages], seeds, steps)
            ground = ground_of(arms[0], base, NoData())
            for arm in arms:
                step = arm.settings(base).tokens_per_step
                points = [part * steps // 10 * step for part in range(1, 11)]
                curve = [(tokens, loss(arm.label, tokens, arm.seed)) for tokens in points]
                figures = {
                    "loss": curve[-1][1],
                    "curve": curve,
                    "ratio": RATIOS[arm.label],
                    "bytes_forward": 10.0,
                    "bytes_backward": 10.0,
                    "seconds": 1.0,
                }
                row = {"arm": asdict(arm), "ground": ground.names, "figures": figures}
                lines.append(json.dumps(row))
        log = tmp_path / "convergence.jsonl"
        log.write_text("\n".join(lines) + "\n")
        return log

    return write
