"""What crosses a cut, by the settings alone: shapes, bytes, links. Nothing is built for it."""

import bisect
import math
from collections.abc import Callable

from thinwire.codec import Codec, build_codecs, parse_codec
from thinwire.schedule import Links
from thinwire.settings.tree import Settings
from thinwire.wire import HEADER_BYTES

BF16_BYTES = 2  # of a number, where a dense cut carries bf16: what ratios compare with
MOST_LOGGED_STEPS = 10_000  # more would take too long to compute again
_MESSAGES = 4096  # bytes of a step's tally and verdict with their headers, and more than that
_SIZE_WORDS = {"exact": "", "expected": "about ", "limits": "at most "}


def wire_shape(settings: Settings) -> tuple[int, ...]:
    """The shape of one microbatch's tensor at every cut."""
    model = settings.model
    return settings.microbatch_size, model.context, settings.boundary.rank or model.dim


def frame_bytes(settings: Settings, cut: int = 0) -> tuple[int, int]:
    """Bytes of one microbatch's frame forward and backward at a cut, or what is expected."""
    shape, is_limit = wire_shape(settings), size_kind(settings, cut) == "limits"
    out, back = (
        HEADER_BYTES + (codec.payload_limit(shape) if is_limit else codec.expected_bytes(shape))
        for codec in _codecs(settings, cut)
    )
    return out, back


def size_kind(settings: Settings, cut: int) -> str:
    """What `frame_bytes` of a cut are: exact, expected (of `step(b)+zstd`) or limits."""
    shape = wire_shape(settings)
    varying = [codec for codec in _codecs(settings, cut) if codec.size_varies]
    if not varying:
        return "exact"
    are_known = all(codec.expected_bytes(shape) < codec.payload_limit(shape) for codec in varying)
    return "expected" if are_known else "limits"


def size_word(settings: Settings, cut: int) -> str:
    """What to write before `frame_bytes` of a cut, with a space behind it; often nothing."""
    return _SIZE_WORDS[size_kind(settings, cut)]


def row_bytes(settings: Settings) -> int:
    """Bytes of the frame of a shared embedding's rows in the mean step, by Zipf's law: some tokens
    come up `row_tokens` times in every step, others in several, the rest when it is their turn.
    """
    if not settings.boundary.shares_embedding or settings.pipeline.stages == 1:
        return 0
    boundary, vocab = settings.boundary, settings.model.vocab
    once = settings.tokens_per_step / (math.log(vocab) + 0.58)  # the rank seen once in a step
    often = once / boundary.row_tokens
    by_tokens = _zipf(often, min(vocab, often * boundary.row_steps))
    by_turn = _zipf(once * boundary.row_steps, vocab) / boundary.row_steps
    rows = min(by_tokens + by_turn, _zipf(once, vocab))
    shape = (math.ceil(rows), settings.model.dim)
    return parse_codec(settings.codec.rows).payload_limit(shape) + HEADER_BYTES


def _zipf(always: float, last: float) -> float:
    """Rows down to the rank `last` that come up, of which those down to `always` always do."""
    return last if always >= last else always * (1 + math.log(last / always))


def bytes_per_token(settings: Settings, cut: int = 0) -> float:
    """What one token costs at a cut, both ways: frames of microbatches, and rows if there are."""
    frames = sum(frame_bytes(settings, cut)) / settings.tokens_per_microbatch
    return frames + 2 * row_bytes(settings) / settings.tokens_per_step


def logged_bytes(settings: Settings, steps: int) -> int:
    """The most that one end of a link sends in so many steps and their validations."""
    boundary, dim, every = settings.boundary, settings.model.dim, settings.train.eval_every
    batches = settings.train.eval_batches * (2 + (steps // every if every else 0))
    rows = moves = 0
    if boundary.shares_embedding:
        most = min(settings.model.vocab, settings.tokens_per_step)
        rows = parse_codec(settings.codec.rows).payload_limit((most, dim)) + HEADER_BYTES
    if boundary.basis_update_every:
        moves = 1 + steps // boundary.basis_update_every
    most_bytes = 0
    for cut in range(settings.pipeline.stages - 1):
        shape = wire_shape(settings)
        out, back = (c.payload_limit(shape) + HEADER_BYTES for c in _codecs(settings, cut))
        frames = settings.pipeline.microbatches
        up = steps * frames * out + batches * out + 2 * moves * out
        down = steps * frames * back + moves * (8 * dim * boundary.rank + HEADER_BYTES)
        most_bytes = max(most_bytes, up, down)
    return most_bytes + steps * (rows + _MESSAGES)


def logged_steps(settings: Settings) -> int:
    """For how many steps the log of what a stage sends is large enough; 0: for none. Two more have
    room in it, if any have: stages go on while their checkpoint is completed.
    """
    room = settings.train.log_mb << 20
    reach = range(MOST_LOGGED_STEPS + 3)
    if not room or settings.pipeline.stages == 1:
        return 0
    fit = bisect.bisect_right(reach, room, key=lambda n: logged_bytes(settings, n)) - 1
    return fit - 2 if fit > 2 else min(max(0, fit), 1)


def checkpoint_interval(settings: Settings) -> int:
    """Steps between checkpoints, few enough for the logs; 0: only at the end, -1: none."""
    every = settings.train.checkpoint_every
    return every if every < 0 else min(filter(None, (every, logged_steps(settings))), default=0)


def checkpoint_steps(settings: Settings) -> Callable[[int], bool]:
    """Says whether a checkpoint follows the update after which so many updates are done."""
    every, last = checkpoint_interval(settings), settings.train.steps
    return lambda done: every >= 0 and (done == last or (every > 0 and done % every == 0))


def network_of(settings: Settings) -> Links:
    """The simulator's links for these settings; they cost no time when they are not emulated."""
    link = settings.link
    delay_s = (link.latency_ms + link.jitter_ms / 2) / 1e3
    own = (link.mbps_up, link.mbps_down, delay_s) if link.emulate else ()
    return Links.alike(settings.pipeline.stages, *own)


def _codecs(settings: Settings, cut: int) -> list[Codec]:
    return list(build_codecs(*settings.codec.names(cut)).values())
