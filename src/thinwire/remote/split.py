"""The split of a run over unlike peers: chosen, and explained."""

import contextlib
import dataclasses
import itertools
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.plan import WORTH, with_split
from thinwire.remote.figures import StageFigures, is_relayed
from thinwire.remote.peerfile import PeerFigures, check_names
from thinwire.remote.search import MEMORY_SHARE, Placement, Search, ranges
from thinwire.report.human import human_bytes
from thinwire.schedule import OPEN, Counts, Simulation, split_layers
from thinwire.settings import Settings

ALIKE = 1.25  # rates within this factor count as equal: measured twice, one machine differs so much


@dataclass(frozen=True)
class Crossing:
    """What the link over one cut carries in a step, in bytes."""

    forward_bytes: int
    backward_bytes: int
    is_relayed: bool


@dataclass(frozen=True)
class Split:
    """Who sits where with how many blocks, why, and what it costs; all lists are by stage."""

    settings: Settings  # with pipeline.split as chosen
    asked_split: list[int]  # what pipeline.split was set to
    peers: list[PeerFigures]
    spare: list[PeerFigures]  # without a stage
    parameters: list[int]
    memory_bytes: list[int]
    crossings: list[Crossing]  # by cut
    simulation: Simulation
    even: Simulation | None  # the even split in the listed order; None where its memory is lacking
    faster: tuple[Counts, float] | None  # an uneven split of equal peers, and its seconds
    why: str

    @property
    def counts(self) -> list[int]:
        """Blocks of each stage."""
        return [len(blocks) for blocks in self.settings.split()]

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the run would learn from in a second."""
        return self.settings.tokens_per_step / self.simulation.step_seconds


def choose_split(settings: Settings, peers: list[PeerFigures]) -> Split:
    """The fastest split of a run over these peers that fits into their memory.

    Peers of about one rate get the split that the run has on one machine, so that they train to
    the same weights; so do all peers where `pipeline.split` is set. A window that is left open is
    the smallest of a few that is about as fast as any. ConfigError where no split fits: it names
    the stage that lacks memory, how much, and what would help.
    """
    check_names(peers)
    stages = settings.pipeline.stages
    if len(peers) < stages:
        raise ConfigError(
            f"pipeline.stages = {stages}, but there {'is' if len(peers) == 1 else 'are'} only "
            f"{len(peers)} peer{'s' if len(peers) != 1 else ''}: every stage needs one. Add "
            f"{stages - len(peers)}, or set pipeline.stages = {len(peers)}"
        )
    if settings.pipeline.window == OPEN and (windows := _windows(settings)):
        smallest = choose_split(_with_window(settings, windows[0]), peers)
        # The run's own split decides its weights: it is not left for a wider window.
        is_own = smallest.settings.split() == settings.split()
        wider = _fitting(settings, peers, windows[1:])
        kept = [split for split in wider if not is_own or split.counts == smallest.counts]
        return _fastest([smallest, *kept])
    figures = StageFigures(settings, peers)
    own: Counts = tuple(len(blocks) for blocks in settings.split())
    as_listed = Search(figures).place(tuple(range(stages)), own)
    of_own = Search(figures, own).best()
    is_fixed = bool(settings.pipeline.split)
    is_alike = _spread(peers) <= ALIKE
    free = of_own if is_fixed else Search(figures).best()
    if is_fixed or (is_alike and of_own.fits):
        candidates = [as_listed, of_own]
    else:
        candidates = [as_listed, of_own, free]
    fitting = [placement for placement in candidates if placement.fits]
    if not fitting:
        raise ConfigError(_lack(figures, of_own if is_fixed else free))
    search = Search(figures)
    limit = min(map(search.seconds, fitting)) * (1 + WORTH)
    chosen = next(placement for placement in fitting if search.seconds(placement) <= limit)
    faster = None
    if not is_fixed and free.fits and search.seconds(free) * (1 + WORTH) < search.seconds(chosen):
        faster = free.counts, search.seconds(free)
    even = tuple(map(len, split_layers(settings.model.layers, [], stages)))
    return Split(
        settings=with_split(settings, chosen.counts),
        asked_split=settings.pipeline.split,
        peers=[peers[peer] for peer in chosen.order],
        spare=[peer for index, peer in enumerate(peers) if index not in chosen.order],
        parameters=[figures.parameters(*stage) for stage in enumerate(ranges(chosen.counts))],
        memory_bytes=[figures.memory(*stage) for stage in enumerate(ranges(chosen.counts))],
        crossings=_crossings(figures, chosen),
        simulation=figures.simulation(chosen.order, chosen.counts),
        even=_if_it_fits(figures, search.place(as_listed.order, even)),
        faster=faster,
        why=_why(figures, chosen, as_listed),
    )


def better_window(split: Split) -> tuple[int, float] | None:
    """A larger window with which these peers would be faster, and the seconds of its step.

    More microbatches in flight hide delays, and take memory; the blocks are dealt out anew.
    """
    pipeline = dataclasses.replace(split.settings.pipeline, split=split.asked_split)
    settings = dataclasses.replace(split.settings, pipeline=pipeline)
    wider = [w for w in _windows(settings) if w > split.simulation.schedule.window]
    found = _fitting(settings, [*split.peers, *split.spare], wider)
    if not found or _seconds(_fastest(found)) * (1 + WORTH) > _seconds(split):
        return None
    best = _fastest(found)
    return best.settings.pipeline.window, _seconds(best)


def _windows(settings: Settings) -> list[int]:
    """The windows that are tried, the smallest first; none where there is nothing to choose."""
    pipeline = settings.pipeline
    if pipeline.schedule != "1f1b" or pipeline.stages == 1:
        return []
    return sorted({min(n * pipeline.stages, pipeline.microbatches) for n in (1, 2, 4)})


def _with_window(settings: Settings, window: int) -> Settings:
    pipeline = dataclasses.replace(settings.pipeline, window=window)
    return dataclasses.replace(settings, pipeline=pipeline)


def _fitting(settings: Settings, peers: list[PeerFigures], windows: list[int]) -> list[Split]:
    """A split with each of these windows whose memory is there."""
    found = []
    for window in windows:
        with contextlib.suppress(ConfigError):
            found.append(choose_split(_with_window(settings, window), peers))
    return found


def _fastest(splits: list[Split]) -> Split:
    """The first that is about as fast as any."""
    limit = min(map(_seconds, splits)) * (1 + WORTH)
    return next(split for split in splits if _seconds(split) <= limit)


def _seconds(split: Split) -> float:
    return split.simulation.step_seconds


def _spread(peers: list[PeerFigures]) -> float:
    rates = [peer.tflops for peer in peers]
    return max(rates) / min(rates)


def _crossings(figures: StageFigures, chosen: Placement) -> list[Crossing]:
    costs, microbatches = figures.costs(chosen.order, chosen.counts), figures.schedule.microbatches
    peers = [figures.peers[peer] for peer in chosen.order]
    return [
        Crossing(forward * microbatches + once, backward * microbatches + once, is_relayed(*ends))
        for forward, backward, once, ends in zip(
            costs.forward_bytes,
            costs.backward_bytes,
            map(costs.each_step, range(len(costs.forward_bytes))),
            itertools.pairwise(peers),
            strict=True,
        )
    ]


def _if_it_fits(figures: StageFigures, placement: Placement) -> Simulation | None:
    return figures.simulation(placement.order, placement.counts) if placement.fits else None


def _why(figures: StageFigures, chosen: Placement, as_listed: Placement) -> str:
    """One sentence on what decided."""
    settings, peers = figures.settings, figures.peers
    used = [peers[peer] for peer in chosen.order]
    is_listed = chosen.order == as_listed.order
    order = "in the listed order" if is_listed else "in the order that gives the shortest step"
    if settings.pipeline.split:
        return f"pipeline.split is set and kept, with the peers {order}."
    if chosen.counts == as_listed.counts:
        alike = _spread(used) <= ALIKE
        reason = "the peers compute about equally fast" if alike else "no other gains enough"
        return f"The even split is kept because {reason}, with the peers {order}."
    parts = []
    if _spread(used) > ALIKE:
        slow = min(range(len(used)), key=lambda stage: used[stage].tflops)
        fast = max(range(len(used)), key=lambda stage: used[stage].tflops)
        parts.append(
            f"{used[slow].name} computes {used[fast].tflops / used[slow].tflops:.1f} times slower "
            f"than {used[fast].name} and gets {_blocks(chosen.counts[slow])}, not "
            f"{chosen.counts[fast]}"
        )
    full = [used[stage].name for stage in _limited_by_memory(figures, chosen)]
    if full:
        parts.append(f"memory allows no more on {', '.join(full)}")
    parts.append("the last stage also computes the head")
    return f"Uneven because {'; '.join(parts)}."


def _limited_by_memory(figures: StageFigures, placement: Placement) -> list[int]:
    """Stages on which one more block would not fit."""
    full = []
    for stage, blocks in enumerate(ranges(placement.counts)):
        has = MEMORY_SHARE * figures.peers[placement.order[stage]].memory_bytes
        more = range(max(0, blocks.start - 1), blocks.stop)
        if len(more) > len(blocks) and figures.memory(stage, more) > has:
            full.append(stage)
    return full


def _blocks(count: int) -> str:
    return f"{count} block{'s' if count != 1 else ''}"


def _lack(figures: StageFigures, placement: Placement) -> str:
    """Which stage lacks how much memory, and what would help: tried, not guessed."""
    settings = figures.settings
    lacking = []
    for stage, blocks in enumerate(ranges(placement.counts)):
        peer = figures.peers[placement.order[stage]]
        needs, usable = figures.memory(stage, blocks), MEMORY_SHARE * peer.memory_bytes
        if needs > usable:
            lacking.append((needs - usable, stage, peer, len(blocks), needs))
    lacks, stage, peer, count, needs = max(lacking, key=lambda row: row[0])
    in_all = sum(row[0] for row in lacking) / MEMORY_SHARE
    names = ", ".join(row[2].name for row in lacking)
    helps = [text for text, changed in _remedies(settings) if _fits(changed, figures.peers)]
    helps.append(f"{human_bytes(in_all)} more memory on {names}{' together' * (len(lacking) > 1)}")
    helps.append("more peers and a larger pipeline.stages; a smaller model")
    fixed = settings.pipeline.split
    what = f"pipeline.split = {fixed} does not fit" if fixed else "no split fits"
    return (
        f"{what} into the memory of these peers. At best, stage {stage} with {_blocks(count)} "
        f"needs {human_bytes(needs)} and {peer.name} has {human_bytes(peer.memory_bytes)}, of "
        f"which {1 - MEMORY_SHARE:.0%} is kept free: it lacks {human_bytes(lacks)}. "
        f"What would help: {'; '.join(helps)}"
    )


def _remedies(settings: Settings) -> list[tuple[str, Settings]]:
    """Changes of the settings that take less memory, most harmless first."""
    found = []
    pipeline, batch = settings.pipeline, settings.train.batch
    if not pipeline.recompute:
        changed = dataclasses.replace(pipeline, recompute=True)
        found.append(("pipeline.recompute = true (more compute)", changed))
    more = next((n for n in (2, 4, 8) if batch % (n * pipeline.microbatches) == 0), None)
    if more:
        changed = dataclasses.replace(pipeline, microbatches=more * pipeline.microbatches)
        found.append((f"pipeline.microbatches = {changed.microbatches}", changed))
    return [(text, dataclasses.replace(settings, pipeline=changed)) for text, changed in found]


def _fits(settings: Settings, peers: list[PeerFigures]) -> bool:
    figures = StageFigures(settings, peers)
    fixed: Counts | None = tuple(settings.pipeline.split) or None
    return Search(figures, fixed).best().fits
