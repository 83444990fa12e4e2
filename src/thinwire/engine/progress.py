"""What a stage says of its work, so that no wait of a run is silent."""


class Progress:
    """What one stage is doing; written by its compute thread, read by the one that sends pulses."""

    def __init__(self) -> None:
        self.begun = 0
        self.doing = "starts"

    def begin(self, doing: str) -> None:
        """The stage begins another piece of work, or another wait."""
        self.doing = doing
        self.begun += 1
