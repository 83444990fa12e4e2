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
    rate_change,
    share_changes,
)

if TYPE_CHECKING:
    from thinwire.model.boundary import (
        Boundary,
        DenseBoundary,
        EmbeddedBoundary,
        ProjectedBoundary,
        SubspaceBoundary,
    )
    from thinwire.model.llama import LayerPlan, Llama, architecture
    from thinwire.model.narrow import Narrow
    from thinwire.model.optim import Muon, Role, RowAdamW, StageOptimizer, SubspaceAdamW, state_like
    from thinwire.model.stage import Past, Score, Stage, token_loss
    from thinwire.model.subspace import Constraint, Held, Space, fixed_table, project, random_basis

__all__ = [
    "PRESETS", "Boundary", "BoundaryConfig", "Constraint", "DenseBoundary",
    "EmbeddedBoundary", "Held", "LayerPlan", "Llama", "LoraConfig", "ModelConfig", "Muon", "Narrow",
    "OptimConfig", "Past", "ProjectedBoundary", "Role", "RowAdamW", "Score", "Space", "Stage",
    "StageOptimizer", "SubspaceAdamW", "SubspaceBoundary", "architecture", "fixed_table",
    "learning_rate", "project", "random_basis", "rate_change", "share_changes", "state_like",
    "token_loss",
]  # fmt: skip

__getattr__ = on_first_use(__name__, {
    "boundary": ("Boundary", "DenseBoundary", "EmbeddedBoundary", "ProjectedBoundary",
                 "SubspaceBoundary"),
    "llama": ("LayerPlan", "Llama", "architecture"),
    "narrow": ("Narrow",),
    "optim": ("Muon", "Role", "RowAdamW", "StageOptimizer", "SubspaceAdamW", "state_like"),
    "stage": ("Past", "Score", "Stage", "token_loss"),
    "subspace": ("Constraint", "Held", "Space", "fixed_table", "project", "random_basis"),
})  # fmt: skip
