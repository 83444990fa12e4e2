"""Tables as a reader of a plain terminal gets them."""

import io

from rich.console import Console


def as_text(renderable, width=80):
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=False, color_system=None).print(renderable)
    return "".join(line.rstrip() + "\n" for line in stream.getvalue().splitlines())
