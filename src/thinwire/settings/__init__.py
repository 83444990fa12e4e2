"""All settings of a run: read, checked, resolved and hashed. No torch is needed for that."""

from thinwire.settings.file import CONFIG, load_settings, make_recipe, read_toml
from thinwire.settings.tree import (
    RunConfig,
    Settings,
    TrainConfig,
    apply_override,
    machine_cores,
    merged,
    threads_per_stage,
)
