import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from thinwire.data import Tokenizer
from thinwire.data.shards import find_shards
from thinwire.data.sources import kind_and_packing, read_texts, stdlib_files, text_files
from thinwire.errors import ConfigError, DataError


def names(folder: Path) -> list[str]:
    return [file.name for file in text_files(str(folder))]


def write(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("text")


def test_stdlib_has_the_library_and_not_its_tests():
    found = {file.name for file in stdlib_files()}
    assert {"argparse.py", "json/decoder.py", "unittest/case.py"} <= found
    unwanted = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    assert not [name for name in found if unwanted & set(name.split("/"))]
    assert not [name for name in found if "_sysconfigdata" in name]


def test_stdlib_is_sorted_and_of_the_expected_size():
    files = stdlib_files()
    assert [file.name for file in files] == sorted(
        (file.name for file in files), key=lambda name: name.split("/")
    )
    assert 5_000_000 < sum(file.size for file in files) < 40_000_000


def test_stdlib_of_a_virtual_environment_is_that_of_its_base(tmp_path):
    venv.create(tmp_path / "env", with_pip=False, symlinks=os.name != "nt")
    python = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    code = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    told = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    assert Path(told.stdout.strip()) == Path(sysconfig.get_path("stdlib"))
    assert stdlib_files()[0].path.is_relative_to(told.stdout.strip())


def test_folder_is_read_recursively_in_path_order(tmp_path):
    write(tmp_path, "b.txt", "a/z.md", "a/b/c.py", "a.txt", "a-b.jsonl", "x.parquet", "w.tokens")
    expected = ["a/b/c.py", "a/z.md", "a-b.jsonl", "a.txt", "b.txt", "w.tokens", "x.parquet"]
    assert names(tmp_path) == expected


def test_packed_files_count_and_others_do_not(tmp_path):
    write(tmp_path, "a.txt.xz", "b.jsonl.GZ", "c.py.zst", "d.zst", "e.json", "f.txt.bz2")
    assert names(tmp_path) == ["a.txt.xz", "b.jsonl.GZ", "c.py.zst"]
    assert kind_and_packing("B.JSONL.gz") == (".jsonl", ".gz")


def test_hidden_names_are_left_out(tmp_path):
    write(tmp_path, "a.txt", ".git/b.txt", ".hidden.txt")
    assert names(tmp_path) == ["a.txt"]


def test_links_to_files_and_folders_are_followed(tmp_path):
    write(tmp_path, "store/blob", "data/own.txt", "far/deep.txt")
    (tmp_path / "data" / "linked.txt").symlink_to(tmp_path / "store" / "blob")
    (tmp_path / "data" / "far").symlink_to(tmp_path / "far")
    assert names(tmp_path / "data") == ["far/deep.txt", "linked.txt", "own.txt"]


def test_link_loop_of_folders_is_named(tmp_path):
    write(tmp_path, "a/b/c.txt")
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path / "a")
    with pytest.raises(DataError, match=r"b/up is a symbolic link .* loop"):
        text_files(str(tmp_path))


def test_link_loop_and_broken_link_of_files_are_named(tmp_path):
    write(tmp_path, "a.txt")
    (tmp_path / "self.txt").symlink_to(tmp_path / "self.txt")
    with pytest.raises(DataError, match=r"cannot read .*self\.txt"):
        text_files(str(tmp_path))
    (tmp_path / "self.txt").unlink()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt"):
        text_files(str(tmp_path))
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt"):
        text_files(str(tmp_path / "gone.txt"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt is not a regular file"):
        text_files(str(tmp_path))


needs_permissions = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="permissions do not bind this user"
)


@needs_permissions
@pytest.mark.parametrize("find", [text_files, find_shards])
def test_folder_without_permission_is_named(tmp_path, find):
    write(tmp_path, "locked/a.txt")
    (tmp_path / "locked").chmod(0)
    try:
        with pytest.raises(DataError, match=r"cannot read .*locked"):
            find(str(tmp_path / "locked"))
    finally:
        (tmp_path / "locked").chmod(0o755)


@needs_permissions
def test_files_without_permission_are_named(tmp_path):
    write(tmp_path, "a.txt", "a.bin", "t.json")
    for path in tmp_path.iterdir():
        path.chmod(0)
    with pytest.raises(DataError, match=r"cannot read .*a\.txt"):
        list(read_texts(text_files(str(tmp_path / "a.txt"))))
    with pytest.raises(DataError, match=r"cannot read .*a\.bin"):
        find_shards(str(tmp_path / "a.bin"))
    with pytest.raises(DataError, match=r"cannot read the tokenizer .*t\.json"):
        Tokenizer.load(tmp_path / "t.json")


@pytest.mark.parametrize("read", [text_files, find_shards, Tokenizer.load])
def test_home_of_nobody_is_named(read):
    with pytest.raises(
        ConfigError, match=r"data\.(path|tokenizer) = ~nosuchuser/x names an unknown home"
    ):
        read("~nosuchuser/x")


def test_missing_path_and_path_not_set(tmp_path):
    with pytest.raises(DataError, match=r"nothing.* does not exist"):
        text_files(str(tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"needs data\.path"):
        text_files("")


def test_only_unsupported_kinds_are_listed(tmp_path):
    write(tmp_path, "a.pdf", "b.html")
    with pytest.raises(DataError, match=r"only \.html, \.pdf; supported: \.txt"):
        text_files(str(tmp_path))
    with pytest.raises(DataError, match=r"a\.pdf is not a kind"):
        text_files(str(tmp_path / "a.pdf"))


def test_empty_folder(tmp_path):
    with pytest.raises(DataError, match="it is empty"):
        text_files(str(tmp_path))
