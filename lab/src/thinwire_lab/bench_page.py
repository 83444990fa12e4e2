"""`python -m thinwire_lab.bench_page`: what open pages cost a run, in tokens per second.

One run of `thinwire train` on this machine goes on all the time. Its pages are opened and closed in
turns, and each turn with pages is compared with those without before and after it: so a machine
that slows down or has other work decides nothing. Pages are read by another process of this
machine, as those of ten people elsewhere would be; what a browser does with them is not counted.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from thinwire.typed import to_toml
from thinwire_lab.arms import Values
from thinwire_lab.bench import settings_of
from thinwire_lab.bench_link import Row, show

TURN: Values = {
    "model": {"preset": "tiny", "context": 64},  # short steps, of which pages are told most often
    "pipeline": {"stages": 2, "microbatches": 4},
    "link": {"emulate": False},
    "train": {"steps": 10**6, "batch": 8, "eval_every": 0, "checkpoint_every": -1},
}
SETTLE_SECONDS = 2.0  # after pages were opened or closed: a first page imports the server
READER = """
import select, socket, sys
host, _, port = sys.argv[1].rpartition(":")
pages = [socket.create_connection((host, int(port))) for _ in range(int(sys.argv[2]))]
for page in pages:
    page.sendall(f"GET /stream HTTP/1.1\\r\\nHost: {sys.argv[1]}\\r\\n\\r\\n".encode())
while all(page.recv(65536) for page in select.select(pages, [], [])[0]):
    pass
"""


def run_bench(pages: int, seconds: float, repeats: int, folder: Path) -> list[Row]:
    """Tokens per second in each turn of `seconds`, without pages and with them, and what share of a
    core the process takes that leads the run and serves its pages.
    """
    config = folder / "run.toml"
    config.write_text(to_toml(settings_of(str(folder), "pages", TURN)))
    command = [sys.executable, "-m", "thinwire.cli", "train", str(config), "--web", "127.0.0.1:0"]
    turns = list[tuple[int, float, float, float]]()
    with (
        (folder / "output.txt").open("w+") as output,
        subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT) as run,
    ):
        try:
            metrics = folder / "pages" / "metrics.jsonl"
            while run.poll() is None and (not metrics.exists() or metrics.stat().st_size < 4096):
                time.sleep(0.5)
            said = (folder / "output.txt").read_text()
            found = re.search(r"http://(\S+?)/", said)
            if found is None:
                raise SystemExit(f"the run did not start:\n{said}")
            for number in range(2 * repeats + 1):
                count = pages if number % 2 else 0
                with _opened(found[1], count):
                    time.sleep(SETTLE_SECONDS)
                    begin, used = time.time(), _core_seconds(run.pid)
                    time.sleep(seconds)
                    used = _core_seconds(run.pid) - used
                    turns.append((count, begin, time.time(), used / seconds))
        finally:
            run.kill()
    steps = [row for row in map(json.loads, metrics.open()) if row["kind"] == "step"]
    rate = steps[0]["tokens"]  # of one step
    rows: list[Row] = []
    for count, begin, end, core in turns:
        taken = [row["step_seconds"] for row in steps if begin <= row["time"] < end]
        speed = rate / statistics.fmean(taken)
        rows.append({"pages": count, "steps": len(taken), "tokens/s": speed, "core": core})
    return rows


def _core_seconds(process: int) -> float:
    """What a process has computed, without those that it started."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _opened(address: str, pages: int) -> Iterator[None]:
    """So many pages, open in another process."""
    if not pages:
        yield
        return
    reader = subprocess.Popen([sys.executable, "-c", READER, address, str(pages)])
    try:
        yield
        if reader.poll() is not None:
            raise SystemExit("a page was closed by the run")
    finally:
        reader.kill()
        reader.wait()


def change(rows: list[Row]) -> list[float]:
    """By how much each turn with pages is faster than those around it: below 0, it is slower."""
    rates = [float(row["tokens/s"]) for row in rows]
    return [2 * rates[i] / (rates[i - 1] + rates[i + 1]) - 1 for i in range(1, len(rates), 2)]


def main() -> None:
    """Print the turns and what they say."""
    parser = argparse.ArgumentParser(prog="python -m thinwire_lab.bench_page", description=__doc__)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0, help="of one turn")
    parser.add_argument("--repeats", type=int, default=8, help="turns with pages")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="thinwire-pages-") as scratch:
        rows = run_bench(options.pages, options.seconds, options.repeats, Path(scratch))
    show(rows)
    found = change(rows)
    middle = statistics.median(found)
    spread = f"{len(found)} turns, from {min(found):+.2%} to {max(found):+.2%}"
    core = [statistics.median(float(row["core"]) for row in rows[i::2]) for i in (0, 1)]
    print(f"with {options.pages} pages: {middle:+.2%} tokens/s (median of {spread});")
    print(
        f"the process that serves them takes {core[1]:.1%} of a core, without pages {core[0]:.1%}"
    )


if __name__ == "__main__":
    main()
