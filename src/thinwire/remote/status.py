"""How a run over several machines stands: plain data, and the same for people."""

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from thinwire.errors import ConfigError, WireError, printable
from thinwire.report.human import ABSENT, duration, human_bytes, human_flops, loss_text
from thinwire.report.table import plain_table
from thinwire.typed import from_plain


@dataclass(frozen=True)
class PeerStatus:
    """One peer as the host sees it. Unknown numbers are 0; times are seconds since 1970."""

    name: str
    state: str  # what it does, "waiting for a seat", "away", "kicked"
    stage: int | None = None
    blocks: str = ""  # "0..5"
    device: str = ""
    tflops: float = 0.0
    memory_bytes: int = 0
    mbps_up: float = 0.0
    mbps_down: float = 0.0
    round_trip_s: float = 0.0
    is_reachable: bool = False
    last_word: float = 0.0  # when it was last heard
    is_this_machine: bool = False


@dataclass(frozen=True)
class LinkStatus:
    """The link over one cut: which way it takes, and its bytes per second each way."""

    cut: int
    below: str
    above: str
    way: str = ""  # "direct", "relayed", "" = not connected
    forward_bytes_per_s: float = 0.0
    backward_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class StatusReport:
    """How a run stands at a moment. A member knows less of it than the host does."""

    run: str
    run_id: str
    role: str  # "host", "member", or "folder": by what a run on this machine alone has written
    state: str  # "training", "waiting", "forming", "ending"
    time: float  # of this report, seconds since 1970
    epoch: int = 0
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_s: float = 0.0
    waiting_for: str = ""  # in words: "a peer for stage 2"
    waiting_since: float = 0.0
    last_checkpoint: int | None = None  # the step of the newest complete one
    peers: list[PeerStatus] = field(default_factory=list)
    links: list[LinkStatus] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_plain(self) -> dict[str, Any]:
        """As it crosses the socket, and as `--json` shows it."""
        return dataclasses.asdict(self)


def status_from_plain(values: dict[str, Any]) -> StatusReport:
    """A report that another process gave; WireError if this version does not know its form."""
    try:
        bare = {key: value for key, value in values.items() if key not in ("peers", "links")}
        return dataclasses.replace(
            from_plain(StatusReport, bare),
            peers=[from_plain(PeerStatus, item, "peers[]") for item in values.get("peers", [])],
            links=[from_plain(LinkStatus, item, "links[]") for item in values.get("links", [])],
        )
    except (ConfigError, TypeError) as error:
        raise WireError(
            f"the run gave its status in a form that this version does not know ({error}): use the "
            "version that it was started with"
        ) from None


def status_table(report: StatusReport) -> RenderableType:
    """The report for a person."""
    parts: list[RenderableType] = [_facts(report)]
    if report.peers:
        parts.append(_peers(report))
    if any(peer.device for peer in report.peers):
        parts.append(_machines(report))
    if report.links:
        parts.append(_links(report))
    parts += [Text(f"note: {printable(note)}") for note in report.notes]
    return Group(*parts)


def _facts(report: StatusReport) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()

    def row(name: str, text: str) -> None:
        grid.add_row(name, Text(printable(text)))

    number = f" ({report.run_id})" if report.run_id else ""
    row("run", f"{report.run}{number}, seen from {_seen_from(report)}")
    row("state", report.state)
    if report.waiting_for:
        since = _ago(report.waiting_since, report.time)
        row("waiting for", f"{report.waiting_for}, for {since}")
    if report.steps:
        row("step", f"{report.step:,} of {report.steps:,}, loss {loss_text(report.loss)}")
    if report.tokens_per_s:
        row("speed", f"{report.tokens_per_s:,.0f} tokens/s")
    if report.epoch:
        again = report.epoch - 1
        times = "" if again < 1 else f": the run was re-formed {again} time{'s' * (again > 1)}"
        row("epoch", f"{report.epoch}{times}")
    if report.last_checkpoint is not None:
        row("checkpoint", f"step {report.last_checkpoint:,}")
    return grid


def _seen_from(report: StatusReport) -> str:
    return {"host": "its host", "folder": "its folder"}.get(report.role, "this peer")


def _peers(report: StatusReport) -> RenderableType:
    table = plain_table("Peers")
    for name in ("peer", "stage", "blocks"):
        table.add_column(name, no_wrap=True)
    table.add_column("state", overflow="fold")
    table.add_column("last word", justify="right", no_wrap=True)
    for peer in _seated_first(report):
        here = " (here)" if peer.is_this_machine else ""
        table.add_row(
            Text(printable(peer.name) + here),
            ABSENT if peer.stage is None else str(peer.stage),
            printable(peer.blocks) or ABSENT,
            Text(printable(peer.state)),
            f"{_ago(peer.last_word, report.time)} ago" if peer.last_word else ABSENT,
        )
    return table


def _machines(report: StatusReport) -> RenderableType:
    table = plain_table("Machines, as they measured themselves")
    table.add_column("peer", no_wrap=True)
    table.add_column("device", overflow="fold")
    for name in ("rate", "free\nmemory", "up / down\nMbit/s", "round\ntrip"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("has\na door")
    for peer in _seated_first(report):
        rates = f"{peer.mbps_up:,.0f} / {peer.mbps_down:,.0f}" if peer.mbps_up else ABSENT
        if peer.device:
            table.add_row(
                Text(printable(peer.name)),
                Text(printable(peer.device)),
                human_flops(peer.tflops * 1e12) if peer.tflops else ABSENT,
                human_bytes(peer.memory_bytes) if peer.memory_bytes else ABSENT,
                rates,
                f"{peer.round_trip_s * 1e3:,.0f} ms" if peer.round_trip_s else ABSENT,
                "yes" if peer.is_reachable else "no",
            )
    return table


def _seated_first(report: StatusReport) -> list[PeerStatus]:
    return sorted(report.peers, key=lambda p: (p.stage is None, p.stage or 0, p.name))


def _links(report: StatusReport) -> RenderableType:
    table = plain_table("Links")
    table.add_column("cut")
    table.add_column("between", overflow="fold")
    table.add_column("way")
    for name in ("forward", "backward"):
        table.add_column(name, justify="right", no_wrap=True)
    for link in report.links:
        table.add_row(
            str(link.cut),
            Text(printable(f"{link.below} - {link.above}")),
            Text(printable(link.way) or "not connected"),
            _rate(link.forward_bytes_per_s),
            _rate(link.backward_bytes_per_s),
        )
    return table


def _rate(bytes_per_s: float) -> str:
    return f"{human_bytes(bytes_per_s)}/s" if bytes_per_s else ABSENT


def _ago(then: float, now: float | None = None) -> str:
    return duration((time.time() if now is None else now) - then)
