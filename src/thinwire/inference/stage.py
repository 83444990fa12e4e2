"""The process of one stage of a model that writes text, and what it is told: reads, computes, hands
on.

It is started and linked as a stage in training is, under the same TLS, with the same frames and
codecs. It loads the tensors of its own layers alone, and keeps their key-value cache.
"""

import gc

from thinwire.run.processes import die_with_starter

if __name__ == "__main__":
    die_with_starter()  # before the imports, which take seconds: it may be stopped meanwhile
    gc.disable()  # imports make no garbage, and looking for it takes a fifth of their time

import queue
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.codec import Leg, TensorSpec
from thinwire.engine.build import StageBuilder, autocast_for, choose_device, prepare_torch
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.cut import ends_of
from thinwire.engine.state import restore_weights
from thinwire.errors import WireError
from thinwire.inference.text import Choice, Sampling, crosses_by_token
from thinwire.run.peer import Peer, live_as
from thinwire.run.protocol import Chosen, Read
from thinwire.settings import Settings
from thinwire.wire import Frame, FrameKind


class TextStage:
    """One stage with its weights and its ends of the cuts."""

    def __init__(self, settings: Settings, index: int, checkpoint: Checkpoint):
        self.settings = settings
        self.index = index
        self.last = settings.pipeline.stages - 1
        self.device = choose_device(settings.run.device, index)
        prepare_torch(settings, self.device)
        self._builder = StageBuilder(settings, self.device)
        self._stage = self._builder.build(index)
        restore_weights(self._stage, self._builder.space, checkpoint)
        self._stage.eval()
        self._step, self._versions = checkpoint.step, checkpoint.versions
        wire = self._builder.wire_spec
        one = TensorSpec((1, settings.model.context, wire.shape[-1]), wire.dtype, wire.device)
        self._below, self._above = ends_of(settings, index, one)
        self._autocast = autocast_for(settings.run.precision, self.device)
        self._is_cached = crosses_by_token(settings)
        self._past = self._stage.new_past()

    def describe(self) -> dict[str, str]:
        """Its layers and its device, in a few words."""
        return {"layers": self._stage.describe(), "device": str(self.device)}

    def max_payload(self) -> int:
        """The largest payload that the stage below may send: a whole context."""
        ends = (end for end in (self._below, self._above) if end is not None)
        return max((end.payload_limit() for end in ends), default=0) + 65536

    def contract(self, cut: int, epoch: int = 0, at_start: bool = True) -> dict[str, Any]:
        """What both ends of a cut must agree on before the first frame."""
        end, space = self._above if cut == self.index else self._below, self._builder.space
        assert end is not None, f"stage {self.index} has no part in cut {cut}"
        return {
            "config_hash": self.settings.hash,
            "cut": cut,
            "forward_codec": end.codecs[Leg.FORWARD].name,
            "wire_shape": list(end.spec.shape),
            "step": self._step,
            **(space.fingerprints() if space else {}),
        }

    @torch.no_grad()
    def read(self, message: Read, received: Tensor | None) -> Tensor:
        """What this stage makes of the next ids: what crosses the cut above, or logits."""
        ids_BT = torch.tensor([message.ids], device=self.device)
        x = ids_BT if received is None else received
        if message.with_empty_past:
            self._past = self._stage.new_past()
        with self._autocast():
            if self._is_cached:
                return self._stage(x, ids_BT, self._past)
            return self._stage(x, ids_BT)

    def packed(self, z_BTK: Tensor, number: int) -> Frame:
        """The frame that takes an activation to the stage above."""
        assert self._above is not None, "the last stage chooses a token"
        return self._above.pack(FrameKind.EVALUATE, z_BTK, self._step, number, self._versions)

    def unpacked(self, frame: Frame, message: Read) -> Tensor:
        """The activation in a frame of the stage below, another process of this user: it is of what
        was read last, and the codec refuses another size.
        """
        assert self._below is not None, "the first stage reads ids alone"
        return self._below.unpack(frame, (1, len(message.ids), self._below.spec.shape[-1]))


class TextPeer(Peer):
    """Joins the pipeline as one stage, and reads what it is told to until nothing more comes."""

    def run(self) -> None:
        """The whole life of the process; errors leave through `fail`."""
        settings = Settings.from_plain(self.order.settings)
        threading.Thread(target=self._pulse, args=(settings.run.patience,), daemon=True).start()
        self._progress.begin("loads its layers")
        # Whoever started this has been asked about plugins before any stage was.
        checkpoint = Checkpoint.open(Path(self.order.resume), allow_plugins=True)
        stage = TextStage(settings, self.stage, checkpoint)
        self._link(stage, self._introduce(stage))
        arrived: queue.SimpleQueue[Frame | WireError] = queue.SimpleQueue()
        for link in self._links.values():
            link.start(arrived.put, arrived.put)
        below, above = self._links.get(self.stage - 1), self._links.get(self.stage + 1)
        choose = None
        while True:
            self._progress.begin("waits for something to read")
            message = self.receive(Read)
            if not message.ids:
                break
            if message.number == 0:
                how = message.temperature, message.top_k, message.top_p, message.seed
                choose = Choice(Sampling(*how))
            received = None
            if below is not None:
                self._progress.begin("waits for the stage below")
                frame = arrived.get()
                if isinstance(frame, WireError):
                    raise frame
                received = stage.unpacked(frame, message)
            self._progress.begin("reads")
            said = stage.read(message, received)
            if above is not None:
                above.send(stage.packed(said, message.number))
            elif choose is not None:
                self.say(Chosen(choose(said[0, -1].float().cpu())))
        for link in self._links.values():
            link.close(None)
        self._leave()


def main() -> None:
    """Entry point of `python -m thinwire.inference.stage`."""
    live_as(TextPeer)


if __name__ == "__main__":
    main()
