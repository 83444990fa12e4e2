"""All that is inside autograd: models as lists of layers, stages, boundaries, optimizers."""

from typing import TYPE_CHECKING

from thinwire.lazy import on_first_use
from thinwire.model.config import (
    PRESETS,
    BoundaryConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    learning_rate,
    rate_changes,
)

if TYPE_CHECKING:
    from thinwire.model.boundary import Boundary, DenseBoundary, ProjectedBoundary, SubspaceBoundary
    from thinwire.model.layers import Narrow
    from thinwire.model.llama import LayerPlan, Llama, architecture
    from thinwire.model.optim import Muon, Role, RowAdamW, StageOptimizer, SubspaceAdamW
    from thinwire.model.stage import Past, Score, Stage, token_loss
    from thinwire.model.subspace import Constraint, Held, Space, fixed_table, project, random_basis

__getattr__ = on_first_use(__name__, "boundary", "layers", "llama", "optim", "stage", "subspace")
