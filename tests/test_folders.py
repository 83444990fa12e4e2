"""Files and folders are complete or absent, whatever goes wrong on the way."""

import os
import stat
from pathlib import Path

import pytest

from thinwire import folders
from thinwire.errors import ConfigError


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path):
    path = tmp_path / "sub" / "a.json"
    folders.replace_file(path, b"one")
    folders.replace_file(path, b"two")
    assert path.read_bytes() == b"two" and list(path.parent.iterdir()) == [path]
    (tmp_path / "folder" / "content").mkdir(parents=True)
    with pytest.raises(OSError):
        folders.replace_file(tmp_path / "folder", b"no file can take the place of a folder")
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "sub"}


def test_a_private_file_is_its_user_s_alone_from_the_first_byte(tmp_path, monkeypatch):
    modes: list[int] = []
    fsync = os.fsync

    def note_mode(descriptor):
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_mode)
    path = tmp_path / "folder" / "key.pem"
    left = tmp_path / "folder" / f".key.pem.{os.getpid()}"
    left.parent.mkdir(mode=0o777)
    left.write_bytes(b"of a process that was killed")
    before = os.umask(0)
    try:
        folders.replace_file(path, b"secret", private=True)
        folders.replace_file(path, b"other", private=True)
    finally:
        os.umask(before)
    assert modes == [0o600, 0o700] * 2, "the file, then the names in its folder"
    assert path.read_bytes() == b"other" and list(path.parent.iterdir()) == [path]


def test_content_is_on_the_disk_before_a_file_or_a_folder_has_its_name(tmp_path, monkeypatch):
    events: list[int | str] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def note_fsync(descriptor):
        events.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", lambda *names: (events.append("name"), rename(*names))[1])
    monkeypatch.setattr(Path, "replace", lambda *names: (events.append("name"), replace(*names))[1])
    folders.replace_file(tmp_path / "file", b"content")
    assert events == [(tmp_path / "file").stat().st_ino, "name"]
    events.clear()
    with folders.partial_folder(tmp_path, "folder") as partial:
        folders.write_file(partial / "file", b"content")
        folders.put_in_place(partial, tmp_path / "folder")
    inner, outer = (path.stat().st_ino for path in (tmp_path / "folder", tmp_path))
    assert events == [(tmp_path / "folder" / "file").stat().st_ino, inner, "name", outer]


def test_what_nobody_holds_is_swept_away_and_what_is_held_stays(tmp_path):
    (tmp_path / "dead.partial-123").mkdir()
    with folders.partial_folder(tmp_path, "one") as one:
        assert list(tmp_path.iterdir()) == [one]
        with folders.partial_folder(tmp_path, "two") as two:
            assert set(tmp_path.iterdir()) == {one, two}
        assert list(tmp_path.iterdir()) == [one]


def test_a_folder_that_cannot_be_replaced_comes_back(tmp_path, monkeypatch):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "a.txt").write_text("one")

    def full(partial, folder):
        raise OSError("no space left")

    monkeypatch.setattr("thinwire.folders.put_in_place", full)
    made = folders.partial_folder(tmp_path, "made")
    with pytest.raises(OSError, match="no space"), made as partial:
        folders.replace_folder(partial, tmp_path / "made")
    assert (tmp_path / "made" / "a.txt").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_folder_is_claimed_by_one_until_it_lets_go(tmp_path):
    with folders.claimed(tmp_path, "wait"):
        assert folders.is_claimed(tmp_path)
        with pytest.raises(ConfigError, match="wait"), folders.claimed(tmp_path, "wait"):
            raise AssertionError("held twice")
    assert not folders.is_claimed(tmp_path)
