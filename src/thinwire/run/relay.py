"""A relay: a machine that can be reached, where peers meet that cannot.

It is a door that serves nothing of its own and admits every run whose peers know its pass.
"""

import ipaddress
import re
import secrets
import socket
import threading
from pathlib import Path
from typing import TextIO

from thinwire.errors import ConfigError
from thinwire.folders import replace_file
from thinwire.paths import data_folder, expanded
from thinwire.report.human import human_bytes
from thinwire.run.admission import is_address
from thinwire.run.signals import heeding
from thinwire.wire import Door, Route, raise_descriptor_limit
from thinwire.wire.door import LINK_MBPS
from thinwire.wire.sockets import address_text, split_address

_PASS = re.compile(r"[A-Za-z0-9_-]{8,64}")
_PASS_MEANS = "8 to 64 letters, digits, hyphens or underscores"
_LINE_EVERY_S = 10.0


def parse_relay(text: str) -> Route:
    """What follows `host --relay`; the pass is not quoted where something is wrong."""
    address, _, password = text.strip().partition("/")
    if is_address(address) and _PASS.fullmatch(password):
        return Route(address, "relayed", password)
    raise ConfigError(
        f"a relay is written HOST:PORT/PASS, and a pass is {_PASS_MEANS}: copy the line that "
        "`thinwire relay` printed"
    )


def run_relay(listen: str, mbps: float, pass_file: Path | None, stream: TextIO) -> None:
    """Be a relay at HOST:PORT until a signal asks to end; show who meets, and how much passes."""
    host, port = split_address(listen)
    password = _password(pass_file)
    raise_descriptor_limit()
    is_over = threading.Event()
    with Door(host, port) as door:
        door.admit_any(password, mbps)
        with heeding(lambda number, frame: is_over.set()):
            address = outside_address(host, door.port)
            print(_welcome(host, address, password, mbps), file=stream, flush=True)
            last = ""
            while not is_over.wait(_LINE_EVERY_S):
                line = ", ".join(
                    f"run {run}: {traffic.connections} connections, "
                    f"{human_bytes(traffic.relayed_bytes)}"
                    for run, traffic in door.traffic().items()
                )
                if line != last:
                    print(line, file=stream, flush=True)
                last = line
        passed = sum(traffic.relayed_bytes for traffic in door.traffic().values())
    stream.write(f"the relay is closed; {human_bytes(passed)} passed\n")


def _password(pass_file: Path | None) -> str:
    """The pass in the file; without a file, one that is drawn once and kept for this user."""
    path = expanded(pass_file, "--pass-file") if pass_file else data_folder() / "relay-pass"
    try:
        if pass_file is None and not path.exists():
            replace_file(path, (secrets.token_urlsafe(18) + "\n").encode(), private=True)
        password = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the relay's pass from {path}: {error}") from None
    if not _PASS.fullmatch(password):
        raise ConfigError(f"{path} does not hold a pass: write {_PASS_MEANS}")
    return password


def outside_address(listen: str, port: int) -> str:
    """The address at which others may find this machine, as far as it can know."""
    if listen not in ("", "0.0.0.0", "::"):
        return address_text(listen, port)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it only chooses an own address
            return address_text(probe.getsockname()[0], port)
    except OSError:  # no network
        return address_text("127.0.0.1", port)


def _welcome(listen: str, address: str, password: str, mbps: float) -> str:
    host, port = split_address(address)
    bound = f"at most {mbps or LINK_MBPS:g} Mbit/s for each {'run' if mbps else 'link'}"
    lines = [
        f"relay on port {port} of {listen or 'all addresses'}, {bound}; Ctrl-C closes it",
        "whoever hosts a run adds this, and peers find the relay in the invite:",
        "",
        f"    --relay {address}/{password}",
        "",
    ]
    if not is_public(host):
        lines.append(
            f"note: {host} is not an address of the public internet. If others come from there, "
            f"write the public address or name instead, and forward port {port} to this machine."
        )
    return "\n".join(lines)


def is_public(host: str) -> bool:
    """Whether others find this address from anywhere; of a name, whoever wrote it knows."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return True
