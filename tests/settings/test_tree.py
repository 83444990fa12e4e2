"""The settings as a tree: how they travel, what their hash names, and what follows from them."""

import dataclasses
import os

import pytest

from thinwire.settings import Settings, crossing, machine_cores, threads_per_stage
from thinwire.settings.file import remarks
from thinwire.typed import Scope, to_toml
from thinwire.wire import LinkConfig

KEEPING = {
    ("run", "name"), ("run", "out"), ("run", "patience"), ("run", "on_explosion"), ("run", "wandb"),
    ("train", "keep"), ("train", "checkpoint_every"), ("train", "log_mb"), ("train", "audit"),
    ("train", "audit_replaces"), ("pipeline", "window"),
}  # fmt: skip
MACHINE = {
    ("run", "device"), ("run", "threads"), ("run", "graphs"), ("codec", "memory_mb"),
    ("data", "path"), ("data", "valid_path"), ("data", "text_key"), ("train", "init_from"),
    *(("link", key.name) for key in dataclasses.fields(LinkConfig)),
}  # fmt: skip
KEYS = [
    (section.name, key.name)
    for section in dataclasses.fields(Settings)
    for key in dataclasses.fields(getattr(Settings(), section.name))
]


def with_key(settings, section, key, value):
    changed = dataclasses.replace(getattr(settings, section), **{key: value})
    return dataclasses.replace(settings, **{section: changed})


def other_value(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [*value, 1]
    return value + ("x" if isinstance(value, str) else 1)


@pytest.mark.parametrize(("section", "key"), KEYS, ids=lambda name: name)
def test_the_hash_names_what_is_computed(section, key):
    settings = Settings.from_plain({})
    changed = with_key(settings, section, key, other_value(getattr(
        getattr(settings, section), key)))  # fmt: skip
    assert (changed.hash == settings.hash) == ((section, key) in KEEPING | MACHINE)


def test_every_setting_belongs_to_one_scope():
    settings = Settings.from_plain({})
    scopes: tuple[Scope, ...] = ("result", "keeping", "machine")
    found = {
        scope: {(s, key) for s, keys in settings.of_scope(scope).items() for key in keys}
        for scope in scopes
    }
    assert found["keeping"] == KEEPING and found["machine"] == MACHINE
    assert found["result"] == set(KEYS) - KEEPING - MACHINE


def test_the_hash_is_the_same_for_the_same_settings_said_otherwise():
    implicit = Settings.from_plain({})
    layers = implicit.model.layers
    explicit = Settings.from_plain({"model": {"layers": layers}, "optim": {"clip": 1}})
    assert explicit.hash == implicit.hash
    assert len(implicit.hash) == 12 and int(implicit.hash, 16) >= 0


@pytest.mark.parametrize(("every", "wanted"), [(3, [3, 6, 8]), (0, [8]), (4, [4, 8]), (100, [8])])
def test_checkpoints_and_validations_come_on_time_and_at_the_end(make_settings, every, wanted):
    settings = make_settings(train__steps=8, train__checkpoint_every=every, train__eval_every=every)
    assert [done for done in range(1, 9) if crossing.checkpoint_steps(settings)(done)] == wanted
    assert [done for done in range(1, 9) if settings.is_evaluation_step(done)] == wanted


def test_a_checkpoint_comes_before_the_log_of_what_stages_send_is_full(make_settings):
    def interval(every, room, **changes):
        settings = make_settings(train__checkpoint_every=every, train__log_mb=room, **changes)
        return crossing.checkpoint_interval(settings)

    few = interval(0, 1)
    assert 10 < few < 30, "of 33 kB each, and what validations send"
    settings = make_settings(train__log_mb=1)
    fits, beyond = (crossing.logged_bytes(settings, steps) for steps in (few + 2, few + 3))
    assert fits <= 1 << 20 < beyond
    assert interval(100, 1) == few and interval(5, 1) == 5
    assert interval(-1, 1) == -1 and interval(0, 0) == interval(0, 1, pipeline__stages=1) == 0
    assert interval(0, 10**6) == crossing.MOST_LOGGED_STEPS
    assert [interval(9, 1, train__batch=size) for size in (32, 40, 56, 112)] == [3, 2, 1, 1]
    long = make_settings(train__checkpoint_every=0, train__log_mb=1, train__steps=2 * few + 1)
    saves = [done for done in range(1, 2 * few + 2) if crossing.checkpoint_steps(long)(done)]
    assert saves == [few, 2 * few, 2 * few + 1]
    note = f"a checkpoint follows every {few} steps, before train.log_mb = 1 is full"
    assert note in remarks(long) and note not in remarks(make_settings())
    large = make_settings(train__log_mb=1, train__batch=400)
    assert "train.log_mb = 1 holds no step: a stage sends up to 4 MB in one" in remarks(large)


def test_stages_share_the_cores_that_are_ours(make_settings, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    assert machine_cores() == 6, "of 64 cores we may use 6"
    for stages, threads in ((1, 6), (2, 3), (4, 1)):
        settings = make_settings(run__threads=0, pipeline__stages=stages)
        assert threads_per_stage(settings) == threads
    assert threads_per_stage(make_settings(run__threads=5)) == 5, "what is told counts"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert threads_per_stage(make_settings(run__threads=0)) == 1, "never none"
    monkeypatch.delattr(os, "sched_getaffinity")
    assert machine_cores() == 64


def test_written_settings_explain_every_key():
    lines = to_toml(Settings.from_plain({})).splitlines()
    for section, key in KEYS:
        assert f"[{section}]" in lines
        help = {f.name: f for f in dataclasses.fields(getattr(Settings(), section))}[key].metadata
        explained = [line for line in lines if line.startswith(f"{key} = ")]
        assert any(help["help"] in line for line in explained), f"{section}.{key}"
        for choice in help["choices"]:
            assert any(choice in line for line in explained), f"{section}.{key}: {choice}"
