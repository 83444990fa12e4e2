"""Find the files of a source, in a defined order, and say plainly what is in the way."""

import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import DataError
from thinwire.paths import expanded

TEXT_KINDS = (".txt", ".md", ".py", ".tokens", ".jsonl", ".parquet")
CHAT_KINDS = (".jsonl", ".json", ".parquet")
PACKINGS = (".xz", ".gz", ".zst")

# Third-party packages, test suites and generated folders are not the library's own prose.
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus: where it is, its name in the source, and what `stat` said."""

    path: Path
    name: str
    size: int
    mtime_ns: int
    ctime_ns: int


def kind_and_packing(name: str) -> tuple[str, str]:
    """`"a.jsonl.zst"` -> `(".jsonl", ".zst")`; the packing is empty for an unpacked file."""
    stem, packing = os.path.splitext(name.lower())
    if packing in PACKINGS:
        return os.path.splitext(stem)[1], packing
    return packing, ""


def stdlib_files() -> list[SourceFile]:
    """The .py files of the running Python's standard library, without its test suites."""
    # Not "platstdlib": inside a virtual environment that is the environment, not the library.
    root = Path(sysconfig.get_path("stdlib"))

    def belongs(name: str) -> bool:
        # config-* and _sysconfigdata* are generated when Python is built and name local paths.
        return name not in _NOT_STDLIB and not name.startswith(("config-", "_sysconfigdata"))

    names = [name for name in walk(root, belongs) if name.endswith(".py")]
    if not names:
        raise DataError(
            f"no .py files of the standard library under {root}: this Python was installed "
            'without them; use data.source = "text" with a path of your own'
        )
    return [source_file(root, name) for name in names]


def text_files(path: str, setting: str = "data.path", source: str = "text") -> list[SourceFile]:
    """The supported files at `path`, a file or a folder read recursively.

    In a folder, other kinds of files and hidden names (".git") are left out.
    """
    root = existing(path, source, setting)
    kinds = CHAT_KINDS if source == "chat" else TEXT_KINDS
    supported = ", ".join(kinds)
    if not root.is_dir():
        if kind_and_packing(root.name)[0] not in kinds:
            raise DataError(
                f"{root} is not a kind of file that can be read as {source}; "
                f"supported: {supported}, also compressed as {', '.join(PACKINGS)}"
            )
        return [source_file(root)]
    found = walk(root)
    names = [name for name in found if kind_and_packing(name)[0] in kinds]
    if not names:
        others = sorted({os.path.splitext(name)[1] or name for name in found})
        holds = f"it holds only {', '.join(others[:8])}" if others else "it is empty"
        raise DataError(f"no {source} to read under {root}: {holds}; supported: {supported}")
    return [source_file(root, name) for name in names]


def existing(path: str, source: str, setting: str = "data.path") -> Path:
    """The path of the config, or an error when it is not set or not there."""
    if not path:
        raise DataError(f'data.source = "{source}" needs {setting}: set it to a file or a folder')
    root = expanded(path, setting)
    if not os.path.lexists(root):
        raise DataError(f"{setting} = {path} does not exist: correct it or create it")
    return root


def source_file(root: Path, name: str = "") -> SourceFile:
    """What `stat` says of `root`, or of a file under it, which must be a regular file."""
    path = root / name
    with reading(path):  # a symbolic link may be broken or endless
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a regular file: remove it or choose another data.path")
    return SourceFile(
        path, name or path.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


def is_visible(name: str) -> bool:
    """Whether a file or folder is not hidden."""
    return not name.startswith(".")


def walk(root: Path, belongs: Callable[[str], bool] = is_visible) -> list[str]:
    """Relative paths of all files under `root` whose every part `belongs`, sorted by parts.

    Symbolic links are followed, since download caches are made of them; a link that leads
    back into a folder we are inside of is an error that names it.
    """
    return sorted(_walk(root, "", (), belongs), key=lambda name: name.split("/"))


def _walk(
    folder: Path, prefix: str, parents: tuple[tuple[int, int], ...], belongs: Callable[[str], bool]
) -> Iterator[str]:
    with reading(folder):
        status = folder.stat()
        names = [name for name in os.listdir(folder) if belongs(name)]
    identity = (status.st_dev, status.st_ino)
    if identity in parents:
        raise DataError(
            f"{folder} is a symbolic link to a folder that contains it, an endless loop: "
            "remove the link"
        )
    for name in names:
        if os.path.isdir(folder / name):
            yield from _walk(folder / name, f"{prefix}{name}/", (*parents, identity), belongs)
        else:
            yield prefix + name


@contextmanager
def reading(
    path: Path,
    broken: tuple[type[Exception], ...] = (OSError,),
    advice: str = "repair or remove it, or choose another data.path",
) -> Iterator[None]:
    """Turn what a reader raises at a file or folder that it cannot read into a DataError."""
    try:
        yield
    except broken as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {path}: {reason}; {advice}") from error
