"""A request to stop that comes while the first step is under way, and not before it."""


def stop_in_the_first_step(worker):
    """Ask the worker's run to stop during its first backward: that step is then its last."""
    next(worker.stage.parameters()).register_hook(lambda _: worker.stop_requested.set())
