"""A chosen split for a person, and for a program."""

from typing import Any

from thinwire.model import architecture
from thinwire.remote.split import Split
from thinwire.report.human import duration, human_bytes
from thinwire.settings.crossing import size_kind, size_word


def split_text(split: Split, window: tuple[int, float] | None = None) -> str:
    """Who sits where, what each link carries, and how long a step takes.

    `window` is a better one, and the seconds of its step.
    """
    settings, simulation = split.settings, split.simulation
    return "\n".join(
        [
            "An estimate: nothing is trained. The step is simulated from the peers' figures and "
            "the sizes of frames.",
            "",
            f"model: {sum(split.parameters):,} parameters, "
            f"{architecture(settings.model).describe()}",
            f"step: {settings.train.batch:,} sequences in "
            f"{settings.pipeline.microbatches} microbatches",
            "",
            *_stage_lines(split),
            *([f"without a stage: {', '.join(p.name for p in split.spare)}"] * bool(split.spare)),
            "",
            *_link_lines(split),
            f"limited by: {simulation.bound}",
            "",
            f"why: {split.why}",
            *_faster_lines(split),
            *_window_lines(window),
            _estimate_line(split),
            _even_line(split),
        ]
    )


def split_to_plain(split: Split, window: tuple[int, float] | None = None) -> dict[str, Any]:
    """The split for a program."""
    simulation = split.simulation
    even = split.even.step_seconds if split.even else None
    return {
        "step_seconds": simulation.step_seconds,
        "tokens_per_s": split.tokens_per_s,
        "bound": simulation.bound,
        "even_step_seconds": even,
        "even_tokens_per_s": split.settings.tokens_per_step / even if even else None,
        "split": split.counts,
        "stages": [
            {
                "stage": stage,
                "peer": peer.name,
                "first_block": blocks.start,
                "blocks": len(blocks),
                "parameters": split.parameters[stage],
                "memory_bytes": split.memory_bytes[stage],
                "peer_memory_bytes": peer.memory_bytes,
                "compute_seconds": simulation.compute_seconds[stage],
                "uplink_utilisation": simulation.uplink_utilisation[stage],
                "downlink_utilisation": simulation.downlink_utilisation[stage],
            }
            for stage, (peer, blocks) in enumerate(
                zip(split.peers, split.settings.split(), strict=True)
            )
        ],
        "links": [
            {
                "cut": cut,
                "below": split.peers[cut].name,
                "above": split.peers[cut + 1].name,
                "forward_bytes_per_step": crossing.forward_bytes,
                "backward_bytes_per_step": crossing.backward_bytes,
                "bytes_are": size_kind(split.settings, cut),
                "relayed": crossing.is_relayed,
            }
            for cut, crossing in enumerate(split.crossings)
        ],
        "spare": [peer.name for peer in split.spare],
        "faster_split": list(split.faster[0]) if split.faster else None,
        "faster_step_seconds": split.faster[1] if split.faster else None,
        "better_window": window[0] if window else None,
        "better_window_step_seconds": window[1] if window else None,
        "why": split.why,
        "config_hash": split.settings.hash,
    }


def _stage_lines(split: Split) -> list[str]:
    simulation = split.simulation
    width = max(4, *(len(peer.name) for peer in split.peers))
    lines = [
        f"stage  {'peer':<{width}}  {'blocks':<14}  compute (s)  uplink busy  downlink busy  "
        "memory needed / there"
    ]
    for stage, (peer, blocks) in enumerate(zip(split.peers, split.settings.split(), strict=True)):
        names = f"{len(blocks)}: {blocks.start}..{blocks.stop - 1}"
        lines.append(
            f"{stage:5}  {peer.name:<{width}}  {names:<14}"
            f"  {simulation.compute_seconds[stage]:11.3f}"
            f"  {simulation.uplink_utilisation[stage]:11.0%}"
            f"  {simulation.downlink_utilisation[stage]:13.0%}"
            f"  {human_bytes(split.memory_bytes[stage])} / {human_bytes(peer.memory_bytes)}"
        )
    return lines


def _link_lines(split: Split) -> list[str]:
    lines = []
    for cut, crossing in enumerate(split.crossings):
        way = "relayed: neither can be reached" if crossing.is_relayed else "direct"
        lines.append(
            f"cut {cut}, {split.peers[cut].name} - {split.peers[cut + 1].name} ({way}), per step: "
            f"{size_word(split.settings, cut)}{human_bytes(crossing.forward_bytes)} forward, "
            f"{human_bytes(crossing.backward_bytes)} backward"
        )
    relayed = {cut: c for cut, c in enumerate(split.crossings) if c.is_relayed}
    if relayed:
        size = sum(c.forward_bytes + c.backward_bytes for c in relayed.values())
        word = max((size_word(split.settings, cut) for cut in relayed), key=len)
        lines.append(
            f"the relay, or the host without one, carries {word}{human_bytes(size)} per step; its "
            "own rate is not in the estimate"
        )
    return lines


def _faster_lines(split: Split) -> list[str]:
    if split.faster is None:
        return []
    counts, seconds = split.faster
    return [
        f"note: pipeline.split = {list(counts)} would take {seconds:.3f} s per step: the last "
        "stage also computes the head. Set it in the settings to use it; its cuts lie elsewhere"
    ]


def _window_lines(window: tuple[int, float] | None) -> list[str]:
    if window is None:
        return []
    return [
        f"note: with pipeline.window = {window[0]} a step would take {window[1]:.3f} s: more "
        "microbatches in flight hide more of the delays"
    ]


def _estimate_line(split: Split) -> str:
    seconds, steps = split.simulation.step_seconds, split.settings.train.steps
    return (
        f"estimate: {seconds:.3f} s per step, {split.tokens_per_s:,.0f} tokens/s, "
        f"{duration(seconds * steps)} for {steps:,} steps, not counting start, validations and "
        "checkpoints"
    )


def _even_line(split: Split) -> str:
    if split.even is None:
        return (
            "even split in the listed order: does not fit into the peers' memory with "
            f"{split.simulation.schedule.window} microbatches in flight"
        )
    seconds = split.even.step_seconds
    rate = split.settings.tokens_per_step / seconds
    gain = seconds / split.simulation.step_seconds
    compared = "the same" if abs(gain - 1) < 0.0005 else f"the chosen one is {gain:.2f}x as fast"
    return (
        f"even split in the listed order: {seconds:.3f} s per step, {rate:,.0f} "
        f"tokens/s; {compared}"
    )
