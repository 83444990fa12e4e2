"""How a connection begins at a door: a few short lines, before any byte of TLS.

    door     thinwire-door 2 NONCE
    caller   reach RUN/SERVICE WHO PROOF    or wait, or ping
    door     ok ...                         or: no REASON, or: gone PROOF REASON

A token is WHO.SECRET: each peer and each invite has its own. A relay has one pass without a WHO,
and the line a hyphen there. The proof is an HMAC of nonce and wish under the token. That itself
never crosses the network, and a proof that was overheard does not work a second time. To who was
struck off, the door proves with the same token that it says so.

Many know the pass of a relay, such as peers that were removed from the run. So who waits for a
service of the host, which is any name but that of a link, shows after the proof also the public key
of the run's authority and a signature: RUN is the beginning of that key's fingerprint.
"""

import asyncio
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from thinwire.errors import AdmissionError, WireError, printable
from thinwire.wire.background import on_daemon_thread
from thinwire.wire.kernel import address_text
from thinwire.wire.splice import keep_pace, prepare
from thinwire.wire.tls import Prover

VERSION = 2
LONGEST_LINE = 320  # bytes, of what either side says before bytes are passed on
HERE = b"+"  # what one who waits answers to a call
_MAGIC = "thinwire-door"
_NAME = re.compile(r"[0-9a-f]{16}/[a-z0-9][a-z0-9@._-]{0,79}")
_LINK = "cut-"  # how the service of a link between two stages begins

Wish = Literal["reach", "wait", "ping"]


@dataclass(frozen=True)
class Asked:
    """What a caller wants of a door, and how it proves that it may."""

    wish: Wish
    name: str
    who: str  # empty at a relay, where all show the same pass
    proof: str
    shown: str = ""  # of the authority: its key, and its signature

    @property
    def run(self) -> str:
        """The run that the name belongs to."""
        return self.name.partition("/")[0]

    @property
    def service(self) -> str:
        """What it is about within the run."""
        return self.name.partition("/")[2]

    @property
    def is_for_host(self) -> bool:
        """Whether only the host may do this: to be found under the name of one of its services."""
        return self.wish == "wait" and not self.service.startswith(_LINK)


def check_name(name: str) -> str:
    """The name, if it is one: RUN/SERVICE, where RUN has 16 hexadecimal digits."""
    if not _NAME.fullmatch(name):
        raise WireError(
            f"{printable(name, 100)!r} is not a name at a door: it is 16 hexadecimal digits, a "
            'slash, and a service such as "control" or "cut-2@5"'
        )
    return name


def who_of(token: str) -> str:
    """Whose token it is; empty for the pass of a relay."""
    return token.rpartition(".")[0]


def proof_of(token: str, nonce: str, wish: str, name: str) -> str:
    """Shows that one knows the token, for one wish on one connection."""
    said = f"{_MAGIC} {VERSION} {nonce} {wish} {name}".encode()
    return hmac.new(token.encode(), said, hashlib.sha256).hexdigest()


def to_sign(nonce: str, name: str, proof: str) -> str:
    """What the authority signs for one who waits; with the proof, it counts at one door only."""
    return f"{_MAGIC} {VERSION} {nonce} wait {name} {proof}"


async def greet(caller: socket.socket) -> tuple[str, Asked]:
    """The door's side: say who we are, and hear what is wanted; the nonce, and the wish."""
    nonce = secrets.token_hex(16)
    await say(caller, f"{_MAGIC} {VERSION} {nonce}")
    words = (await hear(caller)).split(" ")
    is_whole = len(words) == 4 or (len(words) == 6 and words[0] == "wait")
    if not is_whole or words[0] not in ("reach", "wait", "ping"):
        raise WireError("the request is not one of reach, wait or ping with a name and a proof")
    wish, name, who, proof, *shown = words
    who = "" if who == "-" else who
    return nonce, Asked(wish, check_name(name), who, proof, " ".join(shown))  # type: ignore[arg-type]


async def call(
    address: str,
    token: str,
    wish: Wish,
    name: str,
    timeout: float,
    prover: Prover | None = None,
) -> tuple[socket.socket, str]:
    """The caller's side: the connection once the door agreed, and what it said beside its ok.

    A host that waits for those who want its services needs the prover of its authority. An
    AdmissionError says that the door knows this token, and that its holder was struck off.
    """
    check_name(name)
    connection = None
    try:
        async with asyncio.timeout(timeout):
            connection = await connect(address)
            keep_pace(connection)
            magic, _, rest = (await hear(connection)).partition(" ")
            version, _, nonce = rest.partition(" ")
            if magic == "no":
                raise WireError(f"the door refused: {rest}")
            if magic != _MAGIC:
                raise WireError("what listens there is not a thinwire door")
            if version != str(VERSION):
                raise WireError(
                    f"the door has version {version} and this process {VERSION}: install the same "
                    "version of thinwire at both ends"
                )
            proof = proof_of(token, nonce, wish, name)
            shown = f" {prover(to_sign(nonce, name, proof))}" if prover else ""
            await say(connection, f"{wish} {name} {who_of(token) or '-'} {proof}{shown}")
            word, _, more = (await hear(connection)).partition(" ")
            if word == "gone":
                shown, _, more = more.partition(" ")
                expected = proof_of(token, nonce, "gone", name)
                if hmac.compare_digest(expected.encode(), shown.encode()):
                    raise AdmissionError(f"the door refused: {more}")
            if word != "ok":
                raise WireError(f"the door refused: {more or word}")
        return connection, more
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, TimeoutError):
            raise WireError(f"{address}: no answer within {timeout:g} s") from None
        if isinstance(error, OSError):
            raise WireError(f"{address}: {why(error)}") from None
        if isinstance(error, WireError):
            raise type(error)(f"{address}: {error}") from None
        raise


async def connect(address: str) -> socket.socket:
    """A TCP connection to a host and port; OSError if there is none to be had."""
    host, port = split_address(address)
    looked_up = on_daemon_thread(  # a name server may take long, and nobody waits for it at the end
        "thinwire lookup", lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    try:
        places = await asyncio.wrap_future(looked_up)
    except UnicodeError:  # Python encodes names before it looks them up
        raise OSError(f"{printable(host, 100)!r} is not the name of a machine") from None
    problem: OSError | None = None
    for family, kind, protocol, _, place in places:
        connection = socket.socket(family, kind, protocol)
        try:
            prepare(connection)
            await asyncio.get_running_loop().sock_connect(connection, place)
            return connection
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):
                raise
            problem = error
    raise problem or OSError(f"{host} has no address")


@contextlib.contextmanager
def noted(origins: dict[str, str], near: socket.socket, home: str) -> Iterator[None]:
    """Keep from where a connection comes that is passed on to a local one, while it lasts."""
    address = address_text(*near.getsockname()[:2])
    origins[address] = home
    try:
        yield
    finally:
        del origins[address]


def why(error: OSError) -> str:
    """The system's own words; asyncio has others for a connection that was refused."""
    if error.errno is None or isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "10.0.0.1:80" or "[::1]:80"."""
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise WireError(f"{printable(address, 100)!r} is not an address: write HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def hear(connection: socket.socket) -> str:
    """One line. It is read byte by byte: what follows it is not ours."""
    loop = asyncio.get_running_loop()
    line = bytearray()
    while (byte := await loop.sock_recv(connection, 1)) != b"\n":
        if not byte:
            raise WireError("the other end closed the connection")
        line += byte
        if len(line) > LONGEST_LINE:
            raise WireError(f"a line at a door has at most {LONGEST_LINE} bytes")
    return printable(line.decode("ascii", errors="replace"))


async def say(connection: socket.socket, line: str) -> None:
    """Send one line; one that is too long loses its end."""
    text = printable(line).replace("\n", " ").encode("ascii", errors="replace")
    await asyncio.get_running_loop().sock_sendall(connection, text[:LONGEST_LINE] + b"\n")


async def refuse(connection: socket.socket, error: WireError) -> None:
    """Say why not; the caller may have gone."""
    word = "gone" if isinstance(error, AdmissionError) else "no"
    with contextlib.suppress(OSError):
        await say(connection, f"{word} {error}")
