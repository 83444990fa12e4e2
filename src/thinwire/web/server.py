"""An HTTP server on a thread of its own, with the guards that everything we serve needs.

On loopback everybody on the machine may read. On any other address, and for whatever an application
keeps to its owner (`has_token`), a request shows the token of the server's address. Pages of other
sites get nothing. The libraries behind it are imported when the first connection comes.
"""

import errno
import hmac
import ipaddress
import secrets
import select
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from thinwire.errors import ConfigError
from thinwire.run.relay import outside_address
from thinwire.wire.sockets import address_text, split_address, why

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_CONNECTIONS = 256  # at once; more are answered with a 503
_LAST_NEAR = 4700  # ports up to this one are tried where the usual one is taken
_HAS_TOKEN = "thinwire.has_token"
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",  # an address may hold a token
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


class WebServer:
    """Serves what `make_app` makes on the server's thread, from `start` to `close`. `listen`:
    HOST:PORT, port 0 for any free one; with `takes_next_port` the next one, where it is in use.
    `token`: what requests outside loopback have to show if it `needs_token`; "" draws one.
    `patience`: seconds for answers under way to end in when it is closed.
    """

    def __init__(
        self,
        make_app: Callable[[], "ASGIApp"],
        listen: str,
        token: str = "",
        takes_next_port: bool = False,
        patience: int = 0,
        needs_token: bool = True,
    ):
        self.token = token or secrets.token_urlsafe(18)
        self._make_app, self._patience, self._needs_token = make_app, patience, needs_token
        self._socket = _listening(*split_address(listen), takes_next_port)
        host, self.port = self._socket.getsockname()[:2]
        self.is_private = is_loopback(host)
        self.address = f"http://{outside_address(host, self.port)}/"
        self.address_with_token = f"{self.address}?token={self.token}"  # may do everything
        self._wake, self._woken = socket.socketpair()
        self._server: uvicorn.Server | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="thinwire web", daemon=True)

    def start(self) -> "WebServer":
        """Answer from now on."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Answer no more, and free the port. May be called twice."""
        if self._is_over:
            return
        self._is_over = True
        self._wake.send(b".")
        if self._server is not None:
            self._server.should_exit = True
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
        import uvicorn

        app = guarded(self._make_app(), self.token, self.is_private, self._needs_token)
        config = uvicorn.Config(
            app, loop="asyncio", http="h11", ws="none", lifespan="off", log_config=None,
            log_level="critical", access_log=False,  # requests hold tokens
            proxy_headers=False, server_header=False, date_header=False,
            limit_concurrency=MOST_CONNECTIONS, timeout_graceful_shutdown=self._patience,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        if not self._is_over:  # `close` says so before it looks for a server to end
            self._server.run(sockets=[self._socket])


def guarded(app: "ASGIApp", token: str, is_private: bool, needs_token: bool) -> "ASGIApp":
    """The application behind the guards. `is_private`: it can be reached from this machine alone.
    An address with the right token sets a cookie, and leads to the same address without it.
    """
    from starlette.datastructures import MutableHeaders
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, RedirectResponse

    async def guard(scope: "Scope", receive: "Receive", send: "Send") -> None:
        async def send_with_headers(message: "Message") -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] != "http":
            return
        request, cookie = Request(scope), f"thinwire-{scope['server'][1]}"
        is_by_link = _is_among(request.query_params.getlist("token"), token)
        accepted = request.headers.get("accept", "")
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        keys = request.cookies.get(cookie, ""), key.strip() if kind.lower() == "bearer" else ""
        scope[_HAS_TOKEN] = has_token = is_by_link or _is_among(keys, token)
        answer = app
        if refusal := _refusal(request, has_token or not (is_private or needs_token), is_private):
            answer = PlainTextResponse(refusal + "\n", 403)
        elif is_by_link and request.method == "GET" and "text/html" in accepted:
            query = [pair for pair in request.query_params.multi_items() if pair[0] != "token"]
            # One slash: two would lead to another site.
            place = "/" + urllib.parse.quote(request.url.path.lstrip("/"))
            answer = RedirectResponse(f"{place}?{urllib.parse.urlencode(query)}".rstrip("?"), 303)
            # Lax: also a link in a letter opens the page, and no other site's page can act by it.
            answer.set_cookie(cookie, token, 31_536_000, httponly=True, samesite="lax")
        await answer(scope, receive, send_with_headers)

    return guard


def _is_among(shown: Iterable[str], token: str) -> bool:
    return any(hmac.compare_digest(one.encode(), token.encode()) for one in shown)


def has_token(scope: "Scope") -> bool:
    """Whether a request shows the token: what only the owner may see or do depends on this."""
    return scope.get(_HAS_TOKEN) is True


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to this machine alone."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refusal(request: "Request", is_welcome: bool, is_private: bool) -> str:
    """Why a request is refused; empty if it is not. A name of another site that leads here (DNS
    rebinding) is caught by the host that was asked for, a page of another site by its origin.
    """
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if origin is not None and origin.lower().rpartition("://")[2] != host.lower():
        return "a page of another site asks: open this address itself"
    if is_welcome:
        return ""
    if not is_private:
        return "the address lacks its token: open it as the terminal shows it, ?token=... included"
    name, _, port = host.rpartition(":")
    if not is_loopback((name if port.isdecimal() else host).strip("[]")):
        return "this is for its own machine alone: open it as http://127.0.0.1 or localhost"
    return ""


def _listening(host: str, port: int, takes_any: bool) -> socket.socket:
    family, both = socket.AF_INET6 if ":" in host else socket.AF_INET, host == "::"
    try:
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        if is_taken and takes_any:
            return _listening(host, port + 1 if port < _LAST_NEAR else 0, port < _LAST_NEAR)
        reason = "is in use by another process" if is_taken else f"cannot be had: {why(error)}"
        raise ConfigError(
            f"{address_text(host, port)} {reason}; name an address of this machine, and a port "
            "that this user may open, or 0 for any free one"
        ) from None
