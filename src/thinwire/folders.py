"""Files and folders that are complete or absent, whatever ends the process, also a loss of power:
content is forced to the disk under another name first, then one rename gives it its own.
"""

import fcntl
import functools
import glob
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from thinwire.errors import ConfigError

_PARTIAL = ".partial-"


def flush(path: Path) -> None:
    """Force a file to the disk, or the names in a folder, where the system can do that."""
    with suppress(OSError) if path.is_dir() else nullcontext():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a file and force it to the disk."""
    path.write_bytes(content)
    flush(path)


def replace_file(path: Path, content: bytes, private: bool = False) -> None:
    """Write a file in one rename: a reader finds what was there before or all of the content. At no
    moment can another user read a `private` one, nor what is beside it.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if private:
            private_folder(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)  # of a killed process that had our number
        opener = functools.partial(os.open, mode=0o600 if private else 0o666)
        with open(fresh, "xb", opener=opener) as file:
            file.write(content)
        flush(fresh)
        fresh.replace(path)
        if private:
            flush(path.parent)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def private_folder(folder: Path) -> None:
    """Make sure that there is such a folder, and that it is this user's alone."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # it may have been there, or the umask may say less


def put_in_place(partial: Path, folder: Path) -> None:
    """Give a folder whose files are on the disk its name."""
    flush(partial)
    partial.rename(folder)
    flush(folder.parent)


def replace_folder(partial: Path, folder: Path) -> None:
    """Give a finished folder its name, also where an older one has it, which comes back if that
    fails.
    """
    if not folder.exists():
        put_in_place(partial, folder)
        return
    old = folder.with_name(next_free_name(folder.parent, f".{folder.name}.old"))
    folder.rename(old)
    try:
        put_in_place(partial, folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def next_free_name(parent: Path, name: str) -> str:
    """`name`, or the first of name-2, name-3, ... that nothing in the folder bears yet."""
    names = (f"{name}-{number}" if number > 1 else name for number in itertools.count(1))
    return next(one for one in names if not (parent / one).exists())


@contextmanager
def partial_folder(parent: Path, name: str, only: str = "") -> Iterator[Path]:
    """A folder beside the one to be made; what is not put in its place is gone afterwards.

    What killed processes left there is removed as well, for the system let go of their locks: all
    of it in a folder of our own, and what was made for the name `only` in one of the user's.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        with _locked(parent, wait=True):  # nobody takes for left behind what has no lock yet
            for left in parent.glob(f"{glob.escape(only) or '*'}{_PARTIAL}*"):
                with suppress(OSError), _locked(left) as is_ours:
                    if is_ours:
                        shutil.rmtree(left, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f"{name}{_PARTIAL}", dir=parent))
            held.enter_context(_locked(partial))
        held.callback(shutil.rmtree, partial, ignore_errors=True)
        partial.chmod(0o755)  # as an ordinary folder: other users may read it
        yield partial


@contextmanager
def claimed(folder: Path, advice: str, private: bool = False) -> Iterator[None]:
    """Hold a folder, a `private` one as this user's alone, for this process; ConfigError, with the
    advice, if another holds it.
    """
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if private:
                private_folder(folder)
            is_ours = held.enter_context(_locked(folder / ".lock", os.O_RDWR | os.O_CREAT))
        except OSError as error:
            raise ConfigError(f"cannot use the folder {folder}: {error}; choose another") from error
        if is_ours is False:  # a filesystem without locks is no reason not to work
            raise ConfigError(f"another process is at work in {folder}: {advice}")
        yield


def is_claimed(folder: Path) -> bool:
    """Whether a process holds the folder."""
    with suppress(OSError), _locked(folder / ".lock") as is_ours:
        return is_ours is False
    return False


@contextmanager
def _locked(path: Path, flags: int = os.O_RDONLY, wait: bool = False) -> Iterator[bool | None]:
    """Lock a file or a folder for as long, or until the process ends, however it ends. False:
    another process holds it. None: the filesystem has no locks.
    """
    descriptor = os.open(path, flags, 0o666)
    try:
        is_ours: bool | None = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            is_ours = False
        except OSError:
            is_ours = None
        yield is_ours
    finally:
        os.close(descriptor)
