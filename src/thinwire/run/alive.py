"""Which runs are alive on this machine, in which folders, and how each stands."""

import math
import time
from pathlib import Path

from thinwire.engine.checkpoint import list_checkpoints, step_of
from thinwire.errors import ConfigError, NotAliveError
from thinwire.paths import peers_folder
from thinwire.report.human import duration
from thinwire.report.metrics import FILE_NAME, last_step
from thinwire.run.checkpoints import is_claimed
from thinwire.run.control_socket import FILE, ask, is_alive
from thinwire.run.status import StatusReport, status_from_plain
from thinwire.settings import RunConfig, load_settings


def alive_reports(given: Path | None) -> list[StatusReport]:
    """How the runs stand that are alive: the one in this folder, or all that are found.

    Without a folder, runs of this machine are looked for in `runs` and those it joined in its own
    folder of peers. NotAliveError says where none was found.
    """
    places = [_runs(), peers_folder()]
    if given is not None:
        found = [_run_folder(given)]
    else:
        found = [*_answering(*places), *_local_runs()]
    reports = [_report(folder) for folder in found if is_alive(folder) or is_claimed(folder)]
    if reports:
        return reports
    raise _not_alive(found[0]) if given is not None else _none_found(places)


def host_folder(given: Path | None) -> Path:
    """The one folder in which a run answers that this machine hosts; NotAliveError says why not."""
    found = [_run_folder(given)] if given is not None else _answering(_runs())
    if not any(map(is_alive, found)):
        for folder in found or _local_runs():
            if is_claimed(folder):
                raise NotAliveError(
                    f"the run in {folder} has no peers: it is a local one, or only starts"
                )
        if given is None and (joined := _answering(peers_folder())):
            raise NotAliveError(
                f"this machine hosts no run: it is a peer of the run in {joined[0]}, and only the "
                "host of a run can do this (`thinwire leave` takes this peer out of it)"
            )
        raise _not_alive(found[0]) if found else _none_found([_runs()])
    return _only(found)


def member_folder(given: Path | None) -> Path:
    """The one folder in which this machine is a peer; NotAliveError says why there is none."""
    found = [given] if given is not None else _answering(peers_folder())
    if not any(map(is_alive, found)):
        if given is None and (hosted := _answering(_runs())):
            raise NotAliveError(
                f"this machine is no peer of a run: it hosts the one in {hosted[0]}. Press Ctrl-C "
                "there to stop it"
            )
        raise _not_alive(found[0]) if found else _none_found([peers_folder()])
    return _only(found)


def hosted_folders() -> list[Path]:
    """The folders of all runs that this machine hosts and that answer."""
    return _answering(_runs())


def _runs() -> Path:
    return Path(RunConfig().out)


def _answering(*places: Path) -> list[Path]:
    """Folders in these places in which a process answers."""
    found = [path.parent for place in places for path in sorted(place.glob(f"*/{FILE}"))]
    return [folder for folder in found if is_alive(folder)]


def _local_runs() -> list[Path]:
    """Folders in which `thinwire train` is at work: it answers no questions."""
    found = [path.parent for path in sorted(_runs().glob("*/.lock"))]
    return [folder for folder in found if is_claimed(folder) and not is_alive(folder)]


def _report(folder: Path) -> StatusReport:
    """What a run says of itself; of a local one, what it has written."""
    if is_alive(folder):
        return status_from_plain(ask(folder, {"ask": "status"}))
    step, now = last_step(folder), time.time()
    notes = ["this is what the run has written so far; its own terminal shows more"]
    if step is not None:
        written = (folder / FILE_NAME).stat().st_mtime
        notes.insert(0, f"its last line was written {duration(now - written)} ago")
    return StatusReport(
        run=folder.resolve().name,
        run_id="",
        role="folder",
        state="training" if step else "starting",
        time=now,
        step=step.step if step else 0,
        steps=step.steps if step else 0,
        loss=step.loss if step and math.isfinite(step.loss) else None,
        tokens_per_s=step.tokens_per_s if step and math.isfinite(step.tokens_per_s) else 0.0,
        last_checkpoint=max(map(step_of, list_checkpoints(folder)), default=None),
        notes=notes,
    )


def _only(found: list[Path]) -> Path:
    if len(found) > 1:
        raise ConfigError(
            f"several runs are alive: name the folder of one, {', '.join(map(str, found))}"
        )
    return found[0]


def _not_alive(folder: Path) -> NotAliveError:
    if not folder.exists():
        return NotAliveError(f"no run is alive in {folder}: there is no such folder")
    return NotAliveError(f"no run is alive in {folder}: it has ended, or runs in another folder")


def _none_found(places: list[Path]) -> NotAliveError:
    looked = " and ".join(f"{place}/" for place in places)
    return NotAliveError(
        f"no run is alive on this machine (looked in {looked}). If its folder is elsewhere, give "
        "it: that of the run on its host, that of `join --folder` on a peer"
    )


def _run_folder(given: Path) -> Path:
    """A settings file stands for the run that it starts."""
    if not given.is_file():
        return given
    return load_settings(given, []).run.folder
