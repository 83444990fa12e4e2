"""What people install: built from a copy of the sources, installed where nothing else of ours is.

Nothing here asks the network: the build uses the setuptools of this environment, and what thinwire
depends on is seen through a .pth file.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import thinwire

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "thinwire"
VERSION = thinwire.__version__
# A proxy or an index of this machine must not be asked either.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_CONFIG_FILE": os.devnull}


def run(*words, cwd=None):
    """What a command prints; it sees nothing of our sources through PYTHONPATH."""
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | OFFLINE
    command = [str(word) for word in words]
    finished = subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution, and the wheel that is built from it."""
    copy = tmp_path_factory.mktemp("copy")
    unwanted = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "runs", "build", "dist", "shared"
    )
    for path in ROOT.iterdir():
        if path.name in unwanted(str(ROOT), [path.name]):
            continue
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(path, copy / path.name, ignore=ignored)
        else:
            shutil.copy(path, copy)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", copy / "dist", copy)
    (sdist,) = (copy / "dist").glob("*.tar.gz")
    (wheel,) = (copy / "dist").glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """An environment with the wheel; what it depends on is that of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # A .pth file within these is not read, so that our own sources stay out of sight.
    (site / "dependencies.pth").write_text("\n".join(sorted(here)) + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", built["wheel"])
    return folder


def test_the_wheel_holds_every_file_of_the_package(built):
    with zipfile.ZipFile(built["wheel"]) as wheel:
        packed = {PurePosixPath(name) for name in wheel.namelist()}
    inside = {path for path in packed if path.parts[0] == "thinwire"}
    ours = {
        PurePosixPath(path.relative_to(SOURCE.parent).as_posix())
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    page = {".html", ".css", ".js", ".svg", ".txt"}  # and the licence of what is not ours
    assert {".toml", ".py", ".typed", *page} == {path.suffix for path in ours}
    assert inside == ours
    assert {path.parts[0] for path in packed} == {"thinwire", f"thinwire-{VERSION}.dist-info"}


def test_the_source_distribution_holds_tests_and_pages(built):
    with tarfile.open(built["sdist"]) as sdist:
        packed = {
            PurePosixPath(name).relative_to(f"thinwire-{VERSION}") for name in sdist.getnames()
        }
    patterns = ("tests/**/*.py", "docs/*.md", "lab/**/*.py", "lab/**/*.jsonl", "examples/*.py",
                "tools/*.py")  # fmt: skip
    for pattern in patterns:
        wanted = {PurePosixPath(path.relative_to(ROOT).as_posix()) for path in ROOT.glob(pattern)}
        assert wanted and wanted <= packed, pattern
    top = {"LICENSE", "README.md", "Makefile", "constraints.txt", "pyproject.toml", "Dockerfile"}
    assert top <= {str(path) for path in packed}
    assert not [path for path in packed if "__pycache__" in path.parts]


@pytest.mark.slow
def test_the_installed_command_works(environment, tmp_path):
    thinwire = environment / "bin" / "thinwire"
    assert run(thinwire, "--version", cwd=tmp_path) == f"thinwire {VERSION}\n"
    place = "import thinwire; print(thinwire.__file__)"
    assert str(environment) in run(environment / "bin" / "python", "-c", place, cwd=tmp_path)
    run(thinwire, "init", "run.toml", cwd=tmp_path)  # reads recipes.toml
    assert "step" in run(thinwire, "plan", "run.toml", "--tflops", "1", cwd=tmp_path)


def test_the_version_has_one_source():
    assert importlib.metadata.version("thinwire") == VERSION
    places = [ROOT / "pyproject.toml", *SOURCE.rglob("*.py")]
    assert [path for path in places if f'"{VERSION}"' in path.read_text()] == [
        SOURCE / "__init__.py"
    ]


def hadolint(path):
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run([program, "--no-color", path], capture_output=True, text=True)


def test_the_dockerfile_passes_its_linter(tmp_path):
    assert hadolint(ROOT / "Dockerfile").stdout == ""
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python\nRUN pip install thinwire\n")
    assert "DL3006" in hadolint(bad).stdout, "an image without a version"


def test_the_image_gets_all_that_its_build_copies():
    """.dockerignore leaves everything out but for what it names."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
