"""run.toml and the settings of a run: read strictly, checked whole, hashed by what they compute."""

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from thinwire.errors import ConfigError, GoneError
from thinwire.settings import Settings, load_settings
from thinwire.settings.file import remarks
from thinwire.typed import to_toml


def test_a_file_fills_the_settings_overrides_win_over_it_and_the_rest_is_default(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[train]\nsteps = 7\nbatch = 24\n[run]\nname = "é"\n[optim]\nwarmup = 3\n')
    settings = load_settings(path, [])
    assert (settings.train.steps, settings.train.batch, settings.run.name) == (7, 24, "é")
    assert settings.link == Settings().link and settings.link.emulate
    assert settings.model == Settings().model.resolved()
    settings = load_settings(path, ["train.steps=80", " link.emulate = false ", "train.steps=1_90"])
    assert settings.train.steps == 190, "the last one wins over all"
    assert settings.link.emulate is False


def test_the_folder_of_a_run_stands_for_its_config_and_for_itself(tmp_path, monkeypatch):
    folder = tmp_path / "moved"
    folder.mkdir()
    (folder / "config.toml").write_text(
        '[run]\nname = "old"\nout = "elsewhere"\n[train]\nsteps = 9'
    )
    settings = load_settings(folder, [])
    assert settings.train.steps == 9
    assert Path(settings.run.out) / settings.run.name == folder
    assert load_settings(folder, ["run.name=new"]).run.name == "new"
    monkeypatch.chdir(folder)
    assert load_settings(Path(), []).run.name == "moved"


@pytest.mark.parametrize(
    "text",
    [b"[train\nsteps = 1", b"steps", b"[train]\nsteps = 1\nsteps = 2", b"x = 'a\n", b"\xff\xfe",
     b"[train]\nsteps = " + b"9" * 5000, b"x = " + b"[" * 100_000],
)  # fmt: skip
def test_broken_toml_is_refused_with_its_file(tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"broken.toml is not valid TOML"):
        load_settings(path, [])


THIN = ["boundary.mode=subspace", "boundary.rank=8"]
CHANGES = [
    [], ["train.steps=12"], THIN, ["model.preset=160m", "model.vocab=50304"],
    [*THIN, "pipeline.stages=2"], ["boundary.mode=projected", "boundary.rank=4"],
    ["boundary.mode=projected", "boundary.rank=4", "boundary.anchor=per-stage", "boundary.table=8"],
    ["boundary.mode=projected", "boundary.rank=4", "boundary.anchor=per-stage"],
    ["boundary.mode=projected", "boundary.rank=4", "boundary.anchor=per-stage", "optim.name=muon"],
    ["optim.name=muon"], ["optim.name=muon", "optim.table_lr=1", "model.embed_std=0.02"],
]  # fmt: skip


@pytest.fixture(params=["what init writes", "what a run leaves"])
def written(request, tmp_path):
    """The files that our own commands write, both from the defaults."""
    asked = Settings()
    path = tmp_path / "run.toml"
    is_init = request.param == "what init writes"
    path.write_text(to_toml(asked) if is_init else to_toml(asked.resolved().relaxed()))
    return path


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: " ".join(changes) or "none")
def test_settings_we_wrote_or_relaxed_mean_the_same_and_need_no_remark(written, changes):
    """A file of ours can be changed like the defaults."""
    settings = load_settings(None, changes)
    assert load_settings(written, changes) == settings
    assert settings.relaxed().resolved() == settings
    assert remarks(settings) == []


def test_a_rank_left_to_the_ratio_follows_the_model():
    asked = ["boundary.mode=projected", "boundary.ratio=12.5"]
    ranks = {"tiny": 10, "160m": 61, "8b": 327}
    for preset, rank in ranks.items():
        settings = load_settings(None, [*asked, f"model.preset={preset}"])
        assert settings.boundary.rank == rank
        assert settings.relaxed().boundary.rank == 0, "else it would stay when the model changes"
    assert load_settings(None, [*asked[:1], "boundary.ratio=4096"]).boundary.rank == 1
    chosen = load_settings(None, [*asked, "boundary.rank=64"])
    assert chosen.boundary.rank == chosen.relaxed().boundary.rank == 64
    assert any("boundary.ratio = 12.5 has no effect" in remark for remark in remarks(chosen))
    assert not remarks(load_settings(None, asked))


def test_sizes_of_a_file_do_not_reshape_another_preset(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[model]\ndim = 128\nlayers = 4\nheads = 12\n")
    with pytest.raises(ConfigError, match=r"contradicts .*run.toml, which sets model.layers = 4, "):
        load_settings(path, ["model.preset=160m"])
    with pytest.raises(ConfigError, match=r"which sets model.dim = 128\. .* --set model.dim=768"):
        load_settings(path, ["model.preset=160m", "model.layers=4"])
    assert load_settings(path, ["model.preset=160m", "model.layers=4", "model.dim=0"])
    assert load_settings(path, ["model.heads=4"]).model.dim == 128


@pytest.mark.parametrize(("changes", "remark"), [
    (["model.dim=64"], 'model.preset = "tiny" is changed: dim 64 (not 128)'),
    (["boundary.basis_seed=3"], "boundary.basis_seed = 3 has no effect without"),
    (["boundary.basis_rate=1"], "boundary.basis_rate = 1.0 has no effect without another"),
    (["data.learn=all"], "data.learn = 'all' has no effect without data.source = \"chat\" or"),
    (["data.path=x"], "data.path = 'x' has no effect without another data.source"),
    (["boundary.ratio=9"], "boundary.ratio = 9.0 has no effect without another boundary.mode"),
    (
        ["data.source=text", "data.path=x", "data.valid_path=y", "data.valid_fraction=0.3"],
        'data.valid_fraction = 0.3 has no effect without data.valid_path = ""',
    ),
])  # fmt: skip
def test_a_setting_that_does_nothing_or_changes_a_preset_is_told(changes, remark):
    (found,) = remarks(load_settings(None, changes))
    assert found.startswith(remark)


@how(deadline=None)
@given(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
    st.floats(1e-300, 1e300),
    st.integers(-(2**62), 2**62),
)
def test_any_text_and_number_survives_writing(path, rate, seed):
    values = {"data": {"path": path}, "optim": {"lr": rate}, "run": {"seed": seed}}
    settings = Settings.from_plain(values)
    assert Settings.from_plain(tomllib.loads(to_toml(settings))) == settings


@pytest.mark.parametrize(
    ("override", "message"),
    [("model.dim=" + "9" * 30, "model.dim = 9+ must fit into 64 bits"),
     ("model.dim=" + "9" * 5000, r"model.dim: cannot read '9+\.\.\. \(5,002 char"),
     ("model.vocab=99999999", "model.vocab = 99999999 must be at least 0 and at most 16,777,216"),
     ("train.batch=9999999999", "train.batch = 9999999999 must be at least 1 and at most"),
     ("pipeline.microbatches=8000000", "pipeline.microbatches = 8000000 must be .* at most 4,096"),
     ("pipeline.microbatches=4096", "do not divide into pipeline.microbatches = 4096"),
     ("run.threads=100000", "run.threads = 100000 must be at least 0 and at most 1,024"),
     ("link.latency_ms=1e13", "link.latency_ms"),
     ("link.mbps_up=1e-9", "link.mbps_up = 1e-09 must be at least 0.001, or 0 .*; 0 = unlimited"),
     ("run.out=~no-such-user/x", "run.out = ~no-such-user/x names an unknown home"),
     ("run.name=" + "漢" * 70, "at most 100 in 200 bytes"),
     ("codec.plugins=" + "[" * 100_000, r"codec.plugins: cannot read '\[+\.\.\.")],
    ids=lambda text: text[:24],
)  # fmt: skip
def test_numbers_and_paths_that_cannot_work_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        load_settings(None, [override])


def test_a_cut_has_the_codecs_that_it_names_and_else_those_of_all(make_settings):
    usual = {"pipeline__stages": 4, "codec__forward": "bf16", "codec__backward": "fp32"}
    cuts = ["2: backward=int4(group=8, hadamard) + ef forward=fp64", " 0 :  forward=fp32 "]
    settings = make_settings(codec__cuts=cuts, **usual)
    found = [settings.codec.names(cut) for cut in range(3)]
    own = "fp64", "int4(group=8, hadamard) + ef"
    assert found == [("fp32", "fp32"), ("bf16", "fp32"), own]
    assert Settings.from_plain(tomllib.loads(to_toml(settings))) == settings
    assert Settings.from_plain(json.loads(json.dumps(settings.to_plain()))) == settings
    assert settings.hash != make_settings(**usual).hash


def test_files_of_earlier_versions_are_read_where_what_has_gone_changed_nothing():
    old = {
        "model": {"classes": 0, "side": 0},
        "data": {"augment": True},
        "boundary": {"basis": "shared", "learn": False, "calibrate": 99, "ranks": []},
        "optim": {"momentum": 0.9, "basis_lr": 1.0},
    }
    assert Settings.from_plain(old) == Settings.from_plain({})


@pytest.mark.parametrize(
    ("section", "keys"),
    [("model", {"side": 32}), ("boundary", {"mode": "projected", "rank": 6, "anchor": "trainable"}),
     ("boundary", {"mode": "projected", "rank": 6, "anchor": "fixed"}),
     ("boundary", {"mode": "projected", "rank": 6, "basis": "per-cut"}),
     ("boundary", {"learn": True}), ("boundary", {"ranks": ["0: 3"]}),
     ("codec", {"forward": "fp8+zstd"}), ("codec", {"backward": "lowrank(2)+ef"}),
     ("codec", {"rows": "fp16"}), ("codec", {"cuts": ["0: forward=fp8"]})],
)  # fmt: skip
def test_what_has_gone_is_refused_with_the_release_that_has_it(section, keys):
    key = list(keys)[-1]
    words = rf"^(?!.*gone.*gone).*{section}\.{key}\S* .*0\.1\.0: pip install thinwire==0\.1\.0$"
    with pytest.raises(GoneError, match=words):
        Settings.from_plain({section: keys})
    with pytest.raises(GoneError, match=words):
        load_settings(None, [f"{section}.{key}={value}" for key, value in keys.items()])
