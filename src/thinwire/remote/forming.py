"""Which of the peers that are here hold the stages of a run, and how many blocks each."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.remote.lobby import Guest
from thinwire.remote.ways import probe_all
from thinwire.run.machine import Machine
from thinwire.run.placement import ChosenSplit, choose_split
from thinwire.settings import Settings

_UNKNOWN_GB = 1e6  # memory of a peer that does not know its own: it will see


def as_peer(guest: Guest, reachable: bool) -> Machine:
    """A peer that is here, for the choice of a split."""
    assert guest.arrived is not None
    machine = guest.arrived.machine
    memory = machine.memory_gb or _UNKNOWN_GB
    return dataclasses.replace(machine, name=guest.name, memory_gb=memory, reachable=reachable)


@dataclass(frozen=True)
class Forming:
    """A split over peers that are here, or why there is none yet."""

    split: ChosenSplit | None
    lacking: str = ""


def form(
    settings: Settings,
    here: list[Guest],
    run: str,
    token_of: Callable[[str], str],
    keeps_split: bool,
) -> Forming:
    """Choose seats and blocks among the peers that are here; their doors are tried first.

    `keeps_split`: the blocks of each stage stay as the settings have them.
    """
    doors = probe_all([*here], run, token_of)
    peers = [as_peer(guest, bool(door.outside)) for guest, door in zip(here, doors, strict=True)]
    if not all(peer.tflops for peer in peers):  # then nothing can be compared: all count as equal
        peers = [dataclasses.replace(peer, tflops=1.0, bf16_tflops=0.0) for peer in peers]
    if keeps_split:
        split = [len(blocks) for blocks in settings.split()]
        pipeline = dataclasses.replace(settings.pipeline, split=split)
        settings = dataclasses.replace(settings, pipeline=pipeline)
    try:
        return Forming(choose_split(settings, peers))
    except ConfigError as error:
        return Forming(None, str(error))
