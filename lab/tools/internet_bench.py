"""Links and runs over an emulated internet of several machines (see wan_network.py): needs root.

    python lab/tools/internet_bench.py links
    python lab/tools/internet_bench.py links --wan ./wan
    python lab/tools/internet_bench.py bursts
    python lab/tools/internet_bench.py runs --case link-bound

`links` measures what a link carries between two nodes: plain TCP; TLS, as it is; by a
door of the accepting end; and by a relay on a third node.

`bursts` times single messages after a silence, by TCP's congestion control.

`runs` trains a case of thinwire_lab.bench with a host and four peers on nodes of their own: all can
be reached, then two accept nothing and meet the others at a relay. Beside it stands what planner,
emulator and simulator say of the same links. In each run one peer is killed and another joins.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from internet_bursts import bench_bursts
from internet_runs import bench_runs, relay_in
from wan_network import Network, Wan, open_network

from thinwire_lab.bench_link import Path as LinkPath
from thinwire_lab.bench_link import alone, goodput, show

SIZES = (64 << 10, 1 << 20)
_SECONDS = 5.0
_PLAIN_PORT = 4618

Row = dict[str, Any]


def bench_links(wan: Wan) -> list[Row]:
    """Goodput and delay between two nodes by each way."""
    rows: list[Row] = []
    with open_network(3, wan) as network, tempfile.TemporaryDirectory() as scratch:
        rows.append({"way": "plain TCP", "size": 0, "Mbit/s": _plain_tcp(network)})
        with relay_in(network, 3, Path(scratch)) as relay:
            for way, by in (("TLS", ""), ("by a door", "door"), ("by a relay", relay)):
                rows += _measured(network, wan, way, by)
    return rows


def _measured(network: Network, wan: Wan, way: str, by: str) -> list[Row]:
    """One way, measured by a process inside the first node."""
    order = {
        "mbps": wan.mbps,
        "latency_ms": wan.latency_ms,
        "listen": network.address(1),
        "other": " ".join(network.prefix(2)),
        "real": True,
        "by": by,
    }
    words = [*network.prefix(1), sys.executable, __file__, "path", json.dumps(order)]
    found = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [{"way": way, **row} for row in json.loads(found)]


def measure_path(order: str) -> None:
    """Inside a node: measure one path to another, and print what was found."""
    path = LinkPath(**json.loads(order))
    delays = alone(path, SIZES)
    rows = []
    for size in SIZES:
        there, back = goodput(path, [size], _SECONDS)
        rows.append(
            {
                "size": size,
                "Mbit/s": there["mbps"],
                "Mbit/s back": back["mbps"],
                "CPU s per GB": there["cpu_s_per_gb"],
                "bytes added": (there["overhead"] + back["overhead"]) / 2,
                "alone, ms": delays[size] * 1e3,
                "model, ms": path.seconds(size) * 1e3,
            }
        )
    print(json.dumps(rows))


def _plain_tcp(network: Network) -> float:
    """Mbit/s that one connection carries without any of ours above it."""
    script = [sys.executable, __file__]
    sink = subprocess.Popen(
        [*network.prefix(1), *script, "sink", network.address(1)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sink.stdout is not None
    sink.stdout.readline()  # it listens
    subprocess.run([*network.prefix(2), *script, "source", network.address(1)], check=True)
    return float(sink.communicate()[0])


def sink(host: str) -> None:
    """Inside a node: read one connection to its end, and print its rate after the first second."""
    with socket.create_server((host, _PLAIN_PORT)) as server:
        print("ready", flush=True)
        connection = server.accept()[0]
    begin, count = time.monotonic(), 0
    while data := connection.recv(1 << 18):
        if time.monotonic() - begin < 1:  # slow start
            start = time.monotonic()
        else:
            count += len(data)
    print(count * 8 / (time.monotonic() - start) / 1e6)


def source(host: str) -> None:
    """Inside a node: send for some seconds."""
    with socket.create_connection((host, _PLAIN_PORT)) as connection:
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            connection.sendall(bytes(1 << 16))


def main() -> None:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("links", "bursts", "runs", "path", "sink", "source"))
    parser.add_argument("order", nargs="?", default="", help=argparse.SUPPRESS)
    parser.add_argument("--mbps", type=float, default=80.0)
    parser.add_argument("--latency-ms", type=float, default=25.0)
    parser.add_argument("--wan", type=Path, help="program that carries packets, without netem")
    parser.add_argument("--case", default="link-bound", help="of bench.toml, for runs")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    inside = {"path": measure_path, "sink": sink, "source": source}
    if options.what in inside:
        inside[options.what](options.order)
        return
    wan = Wan(options.mbps, options.latency_ms, program=options.wan)
    if options.what == "links":
        rows = bench_links(wan)
    elif options.what == "bursts":
        rows = bench_bursts(wan)
    else:
        with tempfile.TemporaryDirectory(prefix="thinwire-internet-") as folder:
            rows = bench_runs(options.case, wan, Path(folder))
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
