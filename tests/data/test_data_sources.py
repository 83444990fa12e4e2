import gzip
import json
import lzma
import os
import sys
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from refusing import refused

from thinwire.data import sources
from thinwire.data.sources import kind_and_packing, read_records, stdlib_files, text_files, text_of
from thinwire.errors import DataError, MissingPackageError

PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def texts(path, key="text"):
    records = read_records(text_files(str(path)), key)
    return [text for record in records if (text := text_of(record, key)).strip()]


def parquet_bytes(tmp_path, values):
    path = tmp_path / "made.bin"
    pyarrow.parquet.write_table(pyarrow.table(values), path)
    return path.read_bytes()


@pytest.mark.parametrize("packing", PACK)
def test_every_kind_is_read_packed_or_not(tmp_path, packing):
    """A plain file is one document; a line of JSON and a row of Parquet are one each."""
    plain = (".md", ".py", ".tokens", ".txt")
    rows = [f"row {i}" for i in range(2500)] + [None, ""]
    table = parquet_bytes(tmp_path, {"id": [0] * 2502, "text": rows})
    lines = [json.dumps({"id": 1, "text": "one\n"}), "", json.dumps({"text": "zwei é\u2028"})]
    lines.insert(1, json.dumps({"text": None}))
    folder = tmp_path / "in"
    folder.mkdir()
    for kind in plain:
        (folder / f"a{kind}{packing}").write_bytes(PACK[packing](f"é {kind}\r\nx\n".encode()))
    (folder / f"b.jsonl{packing}").write_bytes(PACK[packing]("\n".join(lines).encode()))
    (folder / f"c.parquet{packing}").write_bytes(PACK[packing](table))
    wanted = [f"é {kind}\r\nx\n" for kind in plain] + ["one\n", "zwei é\u2028"] + rows[:2500]
    assert texts(folder) == wanted
    files = text_files(str(folder))
    consumed = [record.position for record in read_records(files, "text")]
    assert consumed == sorted(consumed) and consumed[-1] == sum(file.size for file in files)


def test_separator_lines_byte_order_marks_and_white_space_are_no_content(tmp_path):
    for name, content in (("a", b"\xef\xbb\xbfhello"), ("b", b" \n\n"), ("c", b"")):
        (tmp_path / f"{name}.txt").write_bytes(content)
    assert texts(tmp_path) == ["hello"]
    end, path = "<|endoftext|>", tmp_path / "d.txt"
    path.write_text(f"one\n{end}\ntwo {end} two\n{end}\n\n{end}\nlast")
    assert texts(path) == ["one\n", f"two {end} two\n", "last"]


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(sources, "WHOLE_CHARACTERS", 1000)
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 100)


def test_large_text_is_cut_at_blank_lines_or_where_it_must(tmp_path, small_limits):
    paragraph = "a line of text\n" * 3 + "\n"
    path = tmp_path / "a.txt"
    path.write_text(paragraph * 40)
    pieces = texts(path)
    assert "".join(pieces) == paragraph * 40 and len(pieces) > 10
    assert all(100 <= len(piece) < 200 and piece.endswith("\n\n") for piece in pieces[:-1])
    path.write_text("x" * 5000)  # without lines
    assert "".join(texts(path)) == "x" * 5000 and max(map(len, texts(path))) <= 200
    path.write_text(("x" * 49 + "\n") * 20)  # at the limit
    assert len(texts(path)) == 1
    path.write_text(("x" * 49 + "\n") * 20 + "y")
    assert len(texts(path)) > 1
    path.write_text("x" * 1500 + "\n<|endoftext|>\nshort\n<|endoftext|>\nother\n")
    assert texts(path)[-2:] == ["short\n", "other\n"]


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_damaged_archive_is_named(tmp_path, packing, damage):
    whole = PACK[packing](bytes(range(33, 123)) * 1000)
    path = tmp_path / f"broken.txt{packing}"
    path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"no archive at all")
    refused(r"cannot read .*broken\.txt", texts, path)


def test_text_that_is_not_utf8_is_named_or_skipped(tmp_path):
    (tmp_path / "a.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "b.txt").write_text("fine")
    refused(r"a\.txt is not UTF-8", texts, tmp_path)
    files = text_files(str(tmp_path))
    found = read_records(files, "text", skip_undecodable=True)
    assert [record.values for record in found] == [{"text": "fine"}]


@pytest.mark.parametrize(("line", "complaint"), [
    (b"{not json", "as JSON: Expecting .*repair or remove it"),
    (b'{"txt": "a", "id": 1}', r'key "text" .* keys: txt, id. Set data\.text_key'),
    (b'{"text": 3}', 'key "text" .* the keys: text'),
    (b'["text"]', 'key "text" .* the keys: none'),
    (b'{"text": "\xff"}', "repair or remove it"),
    (b'{"text": "\\ud800"}', "not valid Unicode"),
])  # fmt: skip
def test_bad_json_line_is_named_with_its_number(tmp_path, line, complaint):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    refused(rf"a\.jsonl, line 3[:,] .*{complaint}", texts, path)


@pytest.mark.parametrize(("packing", "megabytes"), [(".gz", 20), (".xz", 20), (".zst", 200)])
def test_a_bomb_is_refused_before_it_fills_the_memory(tmp_path, packing, megabytes, monkeypatch):
    monkeypatch.setattr(sources, "ALWAYS_ALLOWED_BYTES", 1 << 20)
    path = tmp_path / f"bomb.txt{packing}"
    path.write_bytes(PACK[packing](bytes(megabytes << 20)))
    tracemalloc.start()
    try:
        refused(r"bomb\.txt.*500 times .*decompress it first", texts, path)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_a_parquet_file_that_repeats_one_text_without_measure_is_refused(tmp_path, monkeypatch):
    """Memory holds one text at a time, but the prepared corpus would fill the disk."""
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet_bytes(tmp_path, {"text": ["x" * 1000] * 20_000}))
    assert len(texts(path)) == 20_000
    names = pyarrow.array([f"{number:050}" for number in range(9000)]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": names}), tmp_path / "names.parquet")
    assert len(texts(tmp_path / "names.parquet")) == 9000, "all of them are said once"
    monkeypatch.setattr(sources, "ALWAYS_ALLOWED_BYTES", 1_500_000)
    refused(r"a\.parquet unpacks to more than", texts, path)


def test_one_document_has_a_limit_but_a_file_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST_BYTES", 1000)
    path = tmp_path / "a.jsonl.gz"
    lines = [json.dumps({"text": "x" * 900})] * 20
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert len(texts(path)) == 20
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n" + " " * 5000).encode()))
    refused(r"a\.jsonl\.gz, line 21: one document of more than", texts, path)
    (tmp_path / "b.parquet").write_bytes(parquet_bytes(tmp_path, {"text": ["a", "x" * 1001]}))
    refused(r"b\.parquet, row 2: one document of more than", texts, tmp_path / "b.parquet")


def test_a_row_of_parquet_has_no_keys_of_other_rows(tmp_path):
    calls = [{"name": "a", "arguments": {"x": "1"}}, {"name": "b", "arguments": {"y": "2"}}]
    messages = [[{"role": "assistant", "tool_calls": [call]}] for call in calls]
    (tmp_path / "a.parquet").write_bytes(parquet_bytes(tmp_path, {"messages": messages}))
    found = read_records(text_files(str(tmp_path), source="chat"))
    assert [record.values["messages"] for record in found] == messages


def test_parquet_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet_bytes(tmp_path, {"content": ["a"]}))
    refused(r'a\.parquet has no column "text".*content', texts, path)
    path.write_bytes(parquet_bytes(tmp_path, {"text": [1, 2]}))
    refused(r"a\.parquet, row 1: .* that holds a string", texts, path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"a\.parquet needs .*'thinwire\[data\]'"):
        texts(path)


def names(folder):
    return [file.name for file in text_files(str(folder))]


def write(folder, *paths):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("text")


def test_stdlib_has_the_library_and_not_its_tests():
    found = {file.name for file in stdlib_files()}
    assert {"argparse.py", "json/decoder.py", "unittest/case.py"} <= found
    unwanted = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    assert not [name for name in found if unwanted & set(name.split("/"))]
    assert not [name for name in found if "_sysconfigdata" in name]


def test_folder_is_read_recursively_in_path_order(tmp_path):
    write(tmp_path, "b.txt", "a/z.md", "a/b/c.py", "a.txt", "a-b.jsonl", "x.parquet", "w.tokens")
    write(tmp_path, "y.jsonl.GZ", "z.py.zst", "d.zst", "e.json", "f.txt.bz2")
    write(tmp_path, ".git/b.txt", ".h.txt")
    read = "a/b/c.py a/z.md a-b.jsonl a.txt b.txt w.tokens x.parquet y.jsonl.GZ z.py.zst"
    assert names(tmp_path) == read.split()
    assert kind_and_packing("B.JSONL.gz") == (".jsonl", ".gz")


def test_links_to_files_and_folders_are_followed(tmp_path):
    write(tmp_path, "store/blob", "data/own.txt", "far/deep.txt")
    (tmp_path / "data" / "linked.txt").symlink_to(tmp_path / "store" / "blob")
    (tmp_path / "data" / "far").symlink_to(tmp_path / "far")
    assert names(tmp_path / "data") == ["far/deep.txt", "linked.txt", "own.txt"]


def test_links_and_pipes_that_lead_nowhere_are_named(tmp_path):
    write(tmp_path, "a/b/c.txt")
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path / "a")
    refused(r"b/up is a symbolic link .* loop", text_files, str(tmp_path))
    for name, target in (("self.txt", "self.txt"), ("gone.txt", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / target)
        refused(rf"cannot read .*{name}", text_files, str(tmp_path / name))
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere")
    refused(r"cannot read .*gone\.txt", text_files, str(folder))
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt is not a regular file"):  # not waited for
        text_files(str(tmp_path / "pipe.txt"))


def test_paths_without_anything_to_read(tmp_path):
    refused(r"nothing.* does not exist", text_files, str(tmp_path / "nothing"))
    refused(r"needs data\.path", text_files, "")
    write(tmp_path, "a.pdf", "b.html")
    refused(r"only \.html, \.pdf; supported: \.txt", text_files, str(tmp_path))
    refused(r"a\.pdf is not a kind", text_files, str(tmp_path / "a.pdf"))
