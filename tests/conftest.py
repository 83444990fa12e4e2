"""Fixtures shared by all tests: a small corpus, small settings, stages run as threads."""

import dataclasses
import gc
import os
import shutil
import sys
import threading
from pathlib import Path

import hypothesis
import pytest

from machines import machines  # noqa: F401 - a fixture
from masks import answers, with_masks
from programs import Program
from settings_values import TINY_MODEL, tiny_settings, write_texts
from thinwire.cli import main
from thinwire.data import DataConfig, prepare
from thinwire.engine.reports import Evaluation, Report, ShardWritten, Step
from thinwire.engine.worker import Worker
from thinwire.run import peers
from thinwire.run.checkpoints import commit
from thinwire.run.processes import Forker, start_process
from thinwire.typed import to_toml
from thinwire.wire import Link, Meter, emulated, memory_pair
from waiting import PROCESS_PATIENCE

# A slow machine is no reason to refuse an example, and every run draws the same ones.
hypothesis.settings.register_profile(
    "calm", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("calm")

# Files that take long begin first: one that began last would leave the other workers idle.
LONGEST = (
    "test_recovery.py", "test_joined_runs.py", "test_commands.py", "test_simulated_faults.py",
    "test_standby.py", "test_cluster_equality.py", "test_audited_runs.py", "test_page.py",
    "test_hosted_recovery.py", "test_runs.py", "test_launch.py",
    "test_life_of_a_run.py", "test_outages.py", "test_train.py",
    "test_relayed_runs.py", "test_hosted_runs.py", "test_export.py",
    "test_demo.py", "test_narrow.py", "test_placement.py", "test_protocol.py", "test_codecs.py",
    "test_headline.py", "test_arms.py", "test_model_compile.py", "test_packaging.py",
)  # fmt: skip


gc.disable()  # imports make no garbage, and looking for it takes a fifth of their time


def pytest_collection_finish():
    gc.freeze()  # nor does what was imported become any
    gc.enable()


def pytest_collection_modifyitems(items):
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


class SharedForker(Forker):
    """Forks the stages of all runs of this process: torch is imported once, not for each run."""

    def close(self):
        """Others use it too; the processes of a run end by themselves."""


@pytest.fixture(scope="session", autouse=True)
def shared_forker():
    shared = SharedForker()

    def environment():
        """What forked processes have of whoever started the one that forks them."""
        changed = ("PYTEST_CURRENT_TEST", "THINWIRE_CACHE")  # and by what tests import:
        changed += ("TORCHINDUCTOR_CACHE_DIR", "TOKENIZERS_PARALLELISM")
        return sys.executable, {**os.environ, **dict.fromkeys(changed, "")}

    usual = environment()

    def forker():
        return shared if environment() == usual else Forker()

    def start(log, own=None):
        """Also a process that is the only one of its run."""
        return start_process(log, own or (shared if environment() == usual else None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "Forker", forker)
        patch.setattr(peers, "start_process", start)
        yield
    Forker.close(shared)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """A folder of small distinct documents."""
    return write_texts(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def corpus(text_folder, tmp_path_factory):
    config = DataConfig(source="text", path=str(text_folder), valid_fraction=0.1)
    return prepare(config, TINY_MODEL["vocab"], tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def masked(corpus, tmp_path_factory):
    """The same corpus, learned in part."""
    return with_masks(corpus, tmp_path_factory.mktemp("masked") / "corpus", answers)


@pytest.fixture
def make_settings(tmp_path, text_folder):
    """Settings of a tiny exact run; `section__key=value` changes one key."""
    return lambda **changes: tiny_settings(tmp_path, text_folder, changes)


@dataclasses.dataclass
class Outcome:
    """What a run in threads left behind."""

    workers: list[Worker]
    reports: list[list[Report]]

    def losses(self):
        return [r.loss for r in self.steps(-1)]

    def valid_losses(self):
        return [r.loss for r in self.evaluations()]

    def steps(self, stage):
        return [r for r in self.reports[stage] if isinstance(r, Step)]

    def evaluations(self):
        return [r for r in self.reports[-1] if isinstance(r, Evaluation)]

    def weights(self):
        return {
            name: parameter.detach().clone()
            for worker in self.workers
            for name, parameter in worker.update.latest.stage.global_parameters().items()
        }

    def shards(self):
        """The reports of written shards by step, in stage order."""
        found: dict[int, list[ShardWritten]] = {}
        for reports in self.reports:
            for report in reports:
                if isinstance(report, ShardWritten):
                    found.setdefault(report.step, []).append(report)
        return found

    def commit(self, folder, step, corpus):
        """Complete the checkpoint of a step, as the coordinator of a run does."""
        written = self.shards()[step]
        facts = {
            "settings": self.workers[0].settings.to_plain(),
            "corpus": corpus.fingerprint,
            **vars(written[0].versions),
        }
        shards = [part.shard for part in written]
        return commit(folder, step, shards, facts, corpus.tokenizer())


@pytest.fixture
def run_in_threads(corpus, tmp_path):
    """Run all stages of a run as threads joined by in-memory links."""
    usual, near = tmp_path / "run", lambda stage: None

    def run(settings, resume=None, prepare_worker=None, folder=usual, data=corpus, far=near):
        count = settings.pipeline.stages
        workers = [
            Worker(settings, stage, far(stage) or data, folder, resume) for stage in range(count)
        ]
        if prepare_worker:
            for worker in workers:
                prepare_worker(worker)
        below: list[Link | None] = [None] * count
        above: list[Link | None] = [None] * count
        for cut in range(count - 1):
            name, limit = f"cut-{cut}", workers[cut].max_payload()
            lower, upper = (emulated(end, settings.link.nic(cut)) for end in memory_pair())
            above[cut] = Link(lower, Meter(), name, limit)
            below[cut + 1] = Link(upper, Meter(), name, limit)
        reports: list[list[Report]] = [[] for _ in range(count)]
        failures: list[BaseException] = []

        def work(stage):
            try:
                workers[stage].run(below[stage], above[stage], reports[stage].append)
            except BaseException as error:
                failures.append(error)
                for link in (below[stage], above[stage]):
                    if link is not None:
                        link.close(0.1)

        threads = [threading.Thread(target=work, args=(s,), daemon=True) for s in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PROCESS_PATIENCE)
            assert not thread.is_alive(), "a stage hangs"
        if failures:
            raise failures[0]
        return Outcome(workers, reports)

    return run


@pytest.fixture(scope="session")
def keep(tmp_path_factory):
    """Makes a folder once for all tests that ask for it in the same words; each gets a copy."""
    made: dict[str, Path] = {}

    def copy(words, folder, make):
        if words not in made:
            kept = tmp_path_factory.mktemp("kept") / folder.name
            make(kept)
            made[words] = kept
        shutil.copytree(made[words], folder)
        return folder

    return copy


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Prepared data, once for all tests and test processes that choose no other place."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all workers
    os.environ["THINWIRE_CACHE"] = str(folder / "shared-cache")
    return folder / "shared-cache"


@pytest.fixture
def config(make_settings, tmp_path):
    """Write a run.toml for a small run in processes."""

    def write(**changes):
        defaults: dict[str, object] = {"run__precision": "fp32", "codec__forward": "bf16",
                                       "codec__backward": "bf16", "link__emulate": True,
                                       "link__latency_ms": 2.0,
                                       "train__checkpoint_every": 2}  # fmt: skip
        settings = make_settings(**{**defaults, **changes})
        path = tmp_path / "run.toml"
        path.write_text(to_toml(settings))
        return path

    return write


@pytest.fixture
def command(capsys):
    """Runs a command in this process: its exit code, what it printed, and its errors."""

    def run(*words):
        code = 0
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def thinwire(cache, tmp_path):
    started: list[Program] = []

    def start(*arguments, into=None, imports=False):
        words = [str(a) for a in arguments]
        started.append(Program(words, cache, tmp_path, into, imports=imports))
        return started[-1]

    yield start
    for program in started:
        if program.process.poll() is None:
            program.process.kill()
            program.process.wait()
