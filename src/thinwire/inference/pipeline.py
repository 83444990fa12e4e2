"""A model that writes text across its live pipeline: a process per stage, links as in training.

The ids to read and the token that the last stage chose take the control streams, a few bytes each;
activations take the links between stages, packed by the run's codecs.
"""

import contextlib
import dataclasses
import functools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from thinwire.engine.build import check_devices
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.reports import Counts
from thinwire.errors import StageError
from thinwire.inference.text import Sampling, TextModel
from thinwire.report import Display
from thinwire.run.coordinator import Coordinator
from thinwire.run.events import Begin, Command, Event, Record, Said, Say, Starting
from thinwire.run.peers import LocalPeers, heed
from thinwire.run.protocol import Chosen, Finished, Order, Read

STAGE = "thinwire.inference.stage"  # the module of a stage's process


class PipelineModel(TextModel):
    """The model of a checkpoint, one process per stage, while it is `running`.

    `emulate` holds messages back as the run's [link] section says.
    """

    slow = (
        "a codec of this run reads more than one token, so every new token sends the whole window "
        "across every cut"
    )

    def __init__(
        self,
        place: Path,
        display: Display,
        device: str = "auto",
        allow_plugins: bool = False,
        emulate: bool = True,
    ):
        self.checkpoint = Checkpoint.open(place, allow_plugins)
        self.checkpoint.verify()
        settings = self.checkpoint.settings
        run = dataclasses.replace(settings.run, device=device)
        link = dataclasses.replace(settings.link, emulate=settings.link.emulate and emulate)
        self.settings = dataclasses.replace(settings, run=run, link=link)
        check_devices(self.settings)
        _ = self.tokenizer  # a checkpoint that cannot write is refused before anything starts
        self.traffic = TextTraffic()
        self._display = display
        self._has_begun = False

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """Start the stages; leaving the context ends them."""
        folder = Path(tempfile.mkdtemp(prefix="thinwire-text-"))
        stages, settings = self.settings.pipeline.stages, self.settings
        place = str(self.checkpoint.folder.resolve())
        order = Order([], {}, settings.to_plain(), corpus="", run_folder=str(folder), resume=place)
        self._coordinator = Coordinator(stages, settings.run.patience, outage=settings.link.outage)
        with contextlib.ExitStack() as resources:
            resources.push(functools.partial(_remove_logs, folder))
            peers = LocalPeers(settings, folder, order, module=STAGE)
            self._peers = resources.enter_context(peers)
            self._peers.start()
            while not self._has_begun:
                self._heed(self._peers.next_event(self._coordinator))
            yield self

    def reader(self, sampling: Sampling) -> Callable[[list[int], int, bool], int]:
        def read(part: list[int], number: int, with_empty_past: bool) -> int:
            start = time.monotonic()
            how = {} if number else dataclasses.asdict(sampling)
            self._tell_all(Read(part, number, with_empty_past or not number, **how))
            while not self._coordinator.is_over:
                event = self._peers.next_event(self._coordinator)
                if isinstance(event, Said) and isinstance(event.message, Chosen):
                    self.traffic.chosen += 1
                    self.traffic.read += len(part)
                    self.traffic.seconds += time.monotonic() - start
                    return event.message.token
                self._heed(event)
            raise StageError("the stages of this model have ended")

        return read

    def finish(self) -> "TextTraffic":
        """Let the stages end in good order; what crossed their links."""
        self._tell_all(Read([]))
        while not self._coordinator.is_over:
            self._heed(self._peers.next_event(self._coordinator))
        self.traffic.control_bytes = self._peers.control_bytes() - self._control_bytes_before
        return self.traffic

    def _tell_all(self, message: Read) -> None:
        for stage in range(self.settings.pipeline.stages):
            self._peers.tell(stage, message)

    def _heed(self, event: Event) -> None:
        heed(self._coordinator, self._peers, self._carry_out, event)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Starting(count, what):
                self._display.progress("start", count, self.settings.pipeline.stages, what)
            case Begin():
                self._has_begun = True
                self._control_bytes_before = self._peers.control_bytes()
            case Say(text):
                self._display.note(text)
            case Record(stage, Finished(meters)):
                if f"cut-{stage}" in meters:
                    self.traffic.links[stage] = meters[f"cut-{stage}"]["sent"]["EVALUATE"]


def _remove_logs(folder: Path, kind: type[BaseException] | None, *_: object) -> None:
    """Logs of a stage that failed are kept, for its error names them; no others."""
    if kind is None or not issubclass(kind, StageError):
        shutil.rmtree(folder, ignore_errors=True)


@dataclasses.dataclass
class TextTraffic:
    """What a text has cost: time, and bytes over each link, frame headers included."""

    chosen: int = 0  # tokens
    read: int = 0  # with those of prompts
    seconds: float = 0.0
    links: dict[int, Counts] = dataclasses.field(default_factory=dict)  # by cut
    control_bytes: int = 0

    def text(self) -> str:
        """A line for the speed, and one for each link."""
        if not self.chosen:
            return "no token was chosen"
        speed = self.chosen / self.seconds
        lines = [f"{self.chosen} tokens in {self.seconds:.2f} s: {speed:.1f} tokens/s"]
        for cut, sent in sorted(self.links.items()):
            payload, header = sent["payload_bytes"], sent["header_bytes"]
            lines.append(
                f"cut {cut}: {(payload + header) / self.read:.1f} bytes per token, "
                f"{payload / self.read:.1f} of them payload ({self.read} tokens crossed, prompt "
                f"included, in {sent['frames']} frames)"
            )
        control = self.control_bytes / self.chosen
        lines.append(f"control streams of all stages: {control:.0f} bytes per token")
        return "\n".join(lines)
