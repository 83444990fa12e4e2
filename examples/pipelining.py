"""A thin cut in a pipelining script of your own: boundary, codec and optimizer of thinwire.

    torchrun --standalone --nproc-per-node 2 examples/pipelining.py

Two ranks learn to count. Of each token 4 coordinates cross instead of 32 channels, in 8 bits
forward and 4 back. What each rank knows of a token by itself, in a table, need not cross.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F

from thinwire.cluster import Crossing, ThinStage
from thinwire.codec import TensorSpec, build_codecs
from thinwire.engine.cut import CutEnd
from thinwire.model import OptimConfig, ProjectedBoundary, Role, Space, StageOptimizer, random_basis

VOCAB, DIM, RANK, BATCH, CONTEXT, MICROBATCHES, STEPS = 50, 32, 4, 4, 8, 4, 60


class Half(nn.Module):
    """Half of the model, up to the cut or from it on."""

    def __init__(self, is_first: bool, crossing: Crossing):
        super().__init__()
        space = Space(random_basis(DIM, RANK, seed=0).float())  # the same on both sides
        table = None if is_first else (VOCAB, DIM)
        self.boundary = ProjectedBoundary(space, own_tables=True, table=table)
        self.block = nn.TransformerEncoderLayer(DIM, 4, 64, dropout=0.0, batch_first=True)
        self.outer = nn.Embedding(VOCAB, DIM) if is_first else nn.Linear(DIM, VOCAB)
        self.is_first, self.crossing = is_first, crossing

    def forward(self, carrier: Tensor, ids: Tensor, number: Tensor) -> Tensor:
        """PyTorch gives the number of the microbatch, and brings a carrier from the other rank."""
        if self.is_first:
            known = self.outer(ids)
            z = self.boundary.encode(self.block(known) - known, ids)
            return self.crossing.send(z, int(number))
        z = self.crossing.receive(carrier, int(number))
        return self.outer(self.block(self.boundary.decode(z, ids) + self.boundary.known(ids)))


dist.init_process_group("gloo")
torch.manual_seed(rank := dist.get_rank())
spec = TensorSpec((BATCH, CONTEXT, RANK), torch.float32, torch.device("cpu"))
crossing = Crossing(CutEnd(build_codecs("int8", "int4"), spec, is_lower=rank == 0), "cpu")
half = Half(rank == 0, crossing)
below, above = (None, crossing) if rank == 0 else (crossing, None)
stage = ThinStage(half, rank, 2, below, above, "cpu")
schedule = Schedule1F1B(stage, MICROBATCHES, lambda x, y: F.cross_entropy(x.transpose(1, 2), y))
matrices = {name: Role.MATRIX for name, p in half.block.named_parameters("block") if p.ndim == 2}
optimizer = StageOptimizer(dict(half.named_parameters()), matrices, OptimConfig(name="muon"))
numbers = torch.arange(MICROBATCHES)
for crossing.step in range(STEPS):
    generator = torch.Generator().manual_seed(crossing.step)  # every rank makes its own ids
    start = torch.randint(VOCAB, (BATCH * MICROBATCHES, 1), generator=generator)
    ids, losses = (start + torch.arange(CONTEXT)) % VOCAB, []
    target = (ids + 1) % VOCAB
    schedule.step(numbers, ids=ids, number=numbers, target=target, losses=losses)
    optimizer.step(lr=0.003)
    if losses and crossing.step % 10 == 9:
        print(f"step {crossing.step + 1}: loss {torch.stack(losses).mean():.3f}", flush=True)
dist.destroy_process_group()
