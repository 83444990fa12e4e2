"""The cluster engine: a run under torchrun, on torch.distributed.pipelining; and its parts, for
pipelining scripts of one's own.
"""

from typing import TYPE_CHECKING

from thinwire.lazy import on_first_use

if TYPE_CHECKING:
    from thinwire.cluster.pipelining import Crossing, ThinStage

__getattr__ = on_first_use(__name__, "pipelining")
