"""Which runs are alive on this machine, and in which folders."""

from pathlib import Path

from thinwire.errors import ConfigError, NotAliveError
from thinwire.paths import peers_folder
from thinwire.remote.control_socket import FILE, is_alive
from thinwire.settings import RunConfig, load_settings


def alive_folders(given: Path | None, hosts: bool = True, members: bool = True) -> list[Path]:
    """The folders in which a run answers: the given one, or all that are found.

    Without a folder, runs of this machine are looked for in `runs` and those it joined in its own
    folder of peers. NotAliveError says where none was found.
    """
    if given is not None:
        folder = _run_folder(given)
        if not is_alive(folder):
            raise NotAliveError(
                f"no run is alive in {folder}: it has ended, or runs in another folder"
            )
        return [folder]
    places = [Path(RunConfig().out)] * hosts + [peers_folder()] * members
    found = [path.parent for place in places for path in sorted(place.glob(f"*/{FILE}"))]
    alive = [folder for folder in found if is_alive(folder)]
    if not alive:
        looked = " and ".join(f"{place}/" for place in places)
        raise NotAliveError(
            f"no run is alive on this machine (looked in {looked}). If its folder is elsewhere, "
            "give it: that of the run on its host, that of `join --folder` on a peer"
        )
    return alive


def only_alive_folder(given: Path | None, hosts: bool = True, members: bool = True) -> Path:
    """The one folder in which a run answers; ConfigError where several do."""
    found = alive_folders(given, hosts, members)
    if len(found) > 1:
        raise ConfigError(
            f"several runs are alive: name the folder of one, {', '.join(map(str, found))}"
        )
    return found[0]


def _run_folder(given: Path) -> Path:
    """A settings file stands for the run that it starts."""
    if not given.is_file():
        return given
    run = load_settings(given, []).run
    return Path(run.out) / run.name
