"""An HTTP server on a thread of its own, with the guards that everything we serve needs.

It is for a person's own machine and network. On loopback everybody on the machine may read. On any
other address, and for whatever an application keeps to its owner (`has_token`), a request shows
the token of the server's address. Pages of other sites get nothing either way: a browser says
which host it was asked for and which page asks, and both must be ours.

The libraries behind it are imported when the first connection comes, on the server's thread. So a
run that nobody looks at pays for a listening socket alone.
"""

import asyncio
import contextlib
import errno
import hmac
import http.cookies
import ipaddress
import secrets
import select
import socket
import threading
import urllib.parse
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from thinwire.errors import ConfigError
from thinwire.wire.sockets import address_text, split_address, why

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application, such as starlette's."""

MOST_CONNECTIONS = 256  # at once; more are answered with a 503
_NEXT_PORTS = 50  # to try where the wanted one is taken
_HAS_TOKEN = "thinwire.has_token"
_HEADERS = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    b"referrer-policy": b"no-referrer",  # an address may hold a token
    b"x-content-type-options": b"nosniff",
}


class _Server(Protocol):
    def run(self, sockets: list[socket.socket]) -> None: ...

    def end(self) -> None: ...


class WebServer:
    """Serves an application from `start` to `close`.

    `make_app` is called on the server's thread when the first connection comes. `listen` is
    HOST:PORT, port 0 for any free one. `token`: what a request outside loopback has to show; one is
    drawn if none is given. `takes_next_port`: where the port is in use, take another one near it.
    `patience`: seconds that answers under way get to end when the server is closed. `needs_token`:
    whether a request outside loopback is refused without it.
    """

    def __init__(
        self,
        make_app: Callable[[], App],
        listen: str,
        token: str = "",
        takes_next_port: bool = False,
        patience: int = 0,
        needs_token: bool = True,
    ):
        self.token = token or new_token()
        self._make_app, self._patience = make_app, patience
        self._needs_token = needs_token
        host, port = split_address(listen)
        self._socket = _listening(host, port, takes_next_port)
        host, self.port = self._socket.getsockname()[:2]
        self.is_private = is_loopback(host)
        self.address = f"http://{address_text(_reached_by(host), self.port)}/"
        self._wake, self._woken = socket.socketpair()
        self._server: _Server | None = None
        self._lock, self._is_over = threading.Lock(), False
        self._thread = threading.Thread(target=self._serve, name="thinwire web", daemon=True)

    @property
    def address_with_token(self) -> str:
        """What its owner opens: the address that may do everything."""
        return f"{self.address}?token={self.token}"

    def start(self) -> "WebServer":
        """Answer from now on."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Answer no more, and free the port. May be called twice."""
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        if not is_first:
            return
        self._wake.send(b".")
        if self._server is not None:
            self._server.end()
        if self._thread.is_alive():
            self._thread.join(self._patience + 5.0)
        for one in (self._socket, self._wake, self._woken):
            one.close()

    def __enter__(self) -> "WebServer":
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self) -> None:
        select.select([self._socket, self._woken], [], [])
        if self._is_over:
            return
        server = _make_server(
            guarded(self._make_app(), self.token, self.is_private, self._needs_token),
            self._patience,
        )
        with self._lock:
            if self._is_over:
                return
            self._server = server
        server.run(sockets=[self._socket])


def _make_server(app: App, patience: int) -> _Server:
    import uvicorn

    class Quiet(uvicorn.Server):
        """Waits without polling, and ends when it is told to on any thread."""

        def __init__(self) -> None:
            super().__init__(
                uvicorn.Config(
                    app,
                    loop="asyncio",
                    http="h11",
                    ws="none",
                    lifespan="off",
                    log_config=None,
                    log_level="critical",
                    access_log=False,  # requests hold tokens
                    proxy_headers=False,
                    server_header=False,
                    date_header=False,
                    limit_concurrency=MOST_CONNECTIONS,
                    timeout_graceful_shutdown=patience,
                )
            )
            self._loop: asyncio.AbstractEventLoop | None = None
            self._ended = asyncio.Event()

        async def main_loop(self) -> None:
            self._loop = asyncio.get_running_loop()
            if not self.should_exit:
                await self._ended.wait()

        def end(self) -> None:
            self.should_exit = True
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # it has just ended
                    self._loop.call_soon_threadsafe(self._ended.set)

    return Quiet()


def guarded(app: App, token: str, is_private: bool, needs_token: bool = True) -> App:
    """The application behind the guards. `is_private`: it can be reached from this machine alone.
    If not, a request must show the token, unless there is no need.

    An address with the right token sets a cookie, and leads to the same address without it.
    """

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        cookie = f"thinwire-{scope['server'][1]}"
        query = urllib.parse.parse_qsl(scope["query_string"].decode("latin-1"), True)
        shown = [value for name, value in query if name == "token"]
        is_by_link = any(hmac.compare_digest(one.encode(), token.encode()) for one in shown)
        has_token = is_by_link or _shows(headers, cookie, token)
        scope[_HAS_TOKEN] = has_token
        is_welcome = has_token or not (is_private or needs_token)
        refusal = _refusal(headers, is_welcome, is_private)
        if refusal:
            await _answer(send, 403, refusal + "\n")
        elif is_by_link and scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            rest = urllib.parse.urlencode([pair for pair in query if pair[0] != "token"])
            # One slash: two would lead to another site.
            path = "/" + urllib.parse.quote(scope["path"].lstrip("/"))
            place = path + (f"?{rest}" if rest else "")
            # Lax: also a link in a letter opens the page, and no other site's page can act by it.
            kept = f"{cookie}={token}; Path=/; HttpOnly; SameSite=Lax; Max-Age=31536000"
            more = {b"location": place.encode(), b"set-cookie": kept.encode()}
            await _answer(send, 303, "", more)
        else:
            await app(scope, receive, _with_headers(send))

    return guard


def has_token(scope: Scope) -> bool:
    """Whether a request shows the token: what only the owner may see or do depends on this."""
    return scope.get(_HAS_TOKEN) is True


def new_token() -> str:
    """A token for a new server."""
    return secrets.token_urlsafe(18)


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to this machine alone."""
    if host.lower() == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _refusal(headers: dict[str, str], is_welcome: bool, is_private: bool) -> str:
    """Why a request is refused; empty if it is not.

    A name of another site that leads here (DNS rebinding) is caught by the host that was asked
    for, a page of another site by its origin. Who shows the token may use any name.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if origin is not None and urllib.parse.urlsplit(origin).netloc.lower() != host.lower():
        return "a page of another site asks: open this address itself"
    if is_welcome:
        return ""
    if not is_private:
        return "the address lacks its token: open it as the terminal shows it, ?token=... included"
    if not is_loopback(_without_port(host)):
        return "this is for its own machine alone: open it as http://127.0.0.1 or localhost"
    return ""


def _shows(headers: dict[str, str], cookie: str, token: str) -> bool:
    """Whether a request holds the token, as a cookie or as `Authorization: Bearer`."""
    jar: http.cookies.SimpleCookie = http.cookies.SimpleCookie()
    with contextlib.suppress(http.cookies.CookieError):
        jar.load(headers.get("cookie", ""))
    kept = jar[cookie].value if cookie in jar else ""
    kind, _, key = headers.get("authorization", "").partition(" ")
    keys = [kept, key.strip() if kind.lower() == "bearer" else ""]
    return any(hmac.compare_digest(one.encode(), token.encode()) for one in keys)


def _without_port(host: str) -> str:
    """The host of a Host header: localhost:8000, [::1]:8000."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return name.strip("[]")


def _with_headers(send: Send) -> Send:
    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            there = {name.lower() for name, _ in message.get("headers", [])}
            more = [pair for pair in _HEADERS.items() if pair[0] not in there]
            message = {**message, "headers": [*message.get("headers", []), *more]}
        await send(message)

    return wrapped


async def _answer(
    send: Send, status: int, text: str, more: dict[bytes, bytes] | None = None
) -> None:
    body, send = text.encode(), _with_headers(send)
    headers = {b"content-type": b"text/plain; charset=utf-8", b"cache-control": b"no-store"}
    headers |= {b"content-length": str(len(body)).encode(), **(more or {})}
    await send({"type": "http.response.start", "status": status, "headers": [*headers.items()]})
    await send({"type": "http.response.body", "body": body})


def _listening(host: str, port: int, takes_next_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    nearby = [*range(port + 1, min(port + _NEXT_PORTS, 65536)), 0] if takes_next_port else []
    for number in (port, *nearby):
        try:
            return socket.create_server(
                (host, number), family=family, backlog=128, dualstack_ipv6=host == "::"
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE and number != ([port, *nearby])[-1]:
                continue
            place = address_text(host, number)
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"{place} is in use by another process: choose another port, or 0 for any "
                    "free one"
                ) from None
            raise ConfigError(
                f"cannot listen on {place}: {why(error)}; name an address of this machine, and a "
                "port that this user may open, or 0 for any free one"
            ) from None
    raise AssertionError


def _reached_by(host: str) -> str:
    """The address that others type: that of this machine where it listens on all of them."""
    if not ipaddress.ip_address(host).is_unspecified:
        return host
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # asks the routing table alone: nothing is sent
        return str(probe.getsockname()[0])
    return "127.0.0.1"
