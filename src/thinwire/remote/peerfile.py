"""What a peer has to give: its rate, its memory, its link. Measured, or listed in a peers.toml."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.settings import read_toml
from thinwire.typed import from_plain, nearest, option

MOST_PEERS = 256  # in one file: choosing among more would take long

EXAMPLE = """\
[[peer]]
name = "ana"
tflops = 12.0
memory_gb = 24.0
mbps_up = 40.0
mbps_down = 200.0
latency_ms = 15.0
reachable = true
"""


@dataclass(frozen=True)
class PeerFigures:
    """`[[peer]]`: one machine that can hold a stage, by its figures."""

    name: str = option("", "how the peer is called; each has a name of its own")
    tflops: float = option(0.0, "rate at which it trains, in TFLOP/s", above=0)
    memory_gb: float = option(0.0, "memory free for the run, in GB (10^9 bytes)", above=0)
    mbps_up: float = option(0.0, "upload rate in Mbit/s; 0 = unlimited", least=0)
    mbps_down: float = option(0.0, "download rate in Mbit/s; 0 = unlimited", least=0)
    latency_ms: float = option(0.0, "one-way delay to the host in ms: half a ping", least=0)
    reachable: bool = option(False, "whether others can open connections to it")

    @property
    def flops_per_s(self) -> float:
        """Floating-point operations per second."""
        return self.tflops * 1e12

    @property
    def memory_bytes(self) -> int:
        """Bytes free for the run."""
        return int(self.memory_gb * 1e9)


def load_peers(path: Path) -> list[PeerFigures]:
    """The peers that a peers.toml lists, in its order; what is wrong in it is named."""
    example = f"give each peer a table such as\n{EXAMPLE.rstrip()}"
    values = read_toml(path, f"write it, and {example}")
    for key in values:
        if key != "peer":
            raise ConfigError(f'{path}: unknown key "{key}"{nearest(key, ["peer"])}')
    listed = values.get("peer", [])
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path} lists no peers: {example}")
    if len(listed) > MOST_PEERS:
        raise ConfigError(f"{path} lists {len(listed):,} peers: at most {MOST_PEERS} are allowed")
    peers = [_peer(table, f"{path}: peer[{index}]") for index, table in enumerate(listed)]
    check_names(peers, f"{path}: ")
    return peers


def check_names(peers: list[PeerFigures], where: str = "") -> None:
    """Refuse two peers of one name: nobody could say which of them sits where."""
    seen: set[str] = set()
    for peer in peers:
        if peer.name in seen:
            raise ConfigError(f'{where}two peers are called "{peer.name}": give one another name')
        seen.add(peer.name)


def _peer(table: Any, where: str) -> PeerFigures:
    peer = from_plain(PeerFigures, table, where)
    for key in ("name", "tflops", "memory_gb"):
        if not getattr(peer, key):
            raise ConfigError(f"{where} lacks {key}: every peer needs name, tflops and memory_gb")
    return peer
