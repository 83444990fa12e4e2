"""What a process becomes that is forked to be a `thinwire` command (programs.py).

Whoever forks imports all of this once, which takes seconds of a core.
"""

import atexit
import gc
import json
import os
import sys
import threading
import traceback

import thinwire.demo
import thinwire.engine
import thinwire.hf.export
import thinwire.hf.importer
import thinwire.inference.serve
import thinwire.run.doctor
import thinwire.run.host
import thinwire.run.join
import thinwire.web.server  # noqa: F401
from thinwire import cli


def main():
    """Be the command of the first line on standard input; the rest of that is its input."""
    gc.enable()
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(0, 1)  # and no byte of what the command reads
    order = json.loads(line)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = ["thinwire", *order["arguments"]]
    code: object = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # as an interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
