"""The page of one run or several: fixed files, one stream of what changes, and a host's actions.

    GET  /               the page; its parts under /static/
    GET  /stream         server-sent events: all that is known, then what is new
    GET  /invite/N       the line that lets others join run N, and its QR code     (with the token)
    POST /invite/N       {"machines": 1}: another such line                        (with the token)
    POST /kick/N         {"peer": "ben"}: remove a peer                            (with the token)

Nothing else of a folder can be asked for. What others wrote (names, events) is data: the page
shows it as text.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from thinwire.errors import ThinwireError
from thinwire.web.server import App, has_token

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from thinwire.web.runs import RunView

STATIC = Path(__file__).parent / "static"
KINDS = {
    "page.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "charts.js": "text/javascript",
    "uPlot.iife.min.js": "text/javascript",
    "uPlot.min.css": "text/css",
    "icon.svg": "image/svg+xml",
}
TICK_SECONDS = 1.0
KEEPALIVE_TICKS = 15  # without news, before a stream shows that it is there
MOST_BODY = 4096  # bytes of a request


def make_page(folders: Sequence[Path], is_own: bool = False) -> App:
    """The application that shows these runs. `is_own`: this process runs them."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    from thinwire.web.runs import RunView

    views = [RunView(folder, is_own) for folder in folders]

    async def static(request: "Request") -> "Response":
        name = request.path_params.get("name", "page.html")
        if name not in KINDS:
            return JSONResponse({"error": "there is no such file"}, 404)
        kept = {"cache-control": "no-cache"}
        return Response((STATIC / name).read_bytes(), media_type=KINDS[name], headers=kept)

    async def stream(request: "Request") -> "Response":
        events = _events(views, has_token(request.scope))
        headers = {"cache-control": "no-store"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def act(request: "Request") -> "Response":
        """Ask the host of a run, for its owner."""
        if not has_token(request.scope):
            text = "only the address with its token may do this: the host's terminal shows it"
            return JSONResponse({"error": text}, 403)
        number = request.path_params["run"]
        if number >= len(views):
            return JSONResponse({"error": "there is no such run"}, 404)
        try:
            body = await _body(request) if request.method == "POST" else {}
            what = request.url.path.split("/")[1]
            return JSONResponse(await asyncio.to_thread(_act, views[number], what, body))
        except ThinwireError as error:
            return JSONResponse({"error": str(error)}, 400)

    return Starlette(
        routes=[
            Route("/", static),
            Route("/static/{name}", static),
            Route("/stream", stream),
            Route("/invite/{run:int}", act, methods=["GET", "POST"]),
            Route("/kick/{run:int}", act, methods=["POST"]),
        ]
    )


async def _body(request: "Request") -> dict[str, Any]:
    """The JSON object of a request; pages of other sites cannot send its type unasked."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise ThinwireError("the request must be application/json")
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > MOST_BODY:
            raise ThinwireError("the request is too long")
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ThinwireError("the request is not a JSON object")
    return values


def _act(view: "RunView", what: str, body: dict[str, Any]) -> dict[str, Any]:
    from thinwire.run.alive import ask

    if what == "kick":
        return ask(view.folder, {"ask": "kick", "peer": body.get("peer")})
    if body:
        line = ask(view.folder, {"ask": "invite", "machines": body.get("machines", 1)})["text"]
    else:
        ask(view.folder, {"ask": "status"})  # a run that has ended invites nobody
        line = _first_invite(view.folder)
    return {"line": line, "qr": _qr_code(line) if line else ""}


def _first_invite(folder: Path) -> str:
    try:
        return (folder / "authority" / "invite.txt").read_text().strip()
    except (OSError, UnicodeError):
        return ""


def _qr_code(text: str) -> str:
    """A QR code as the address of a picture."""
    import segno

    return str(segno.make(text, error="l", micro=False).svg_data_uri(scale=4, border=2))


async def _events(views: Sequence["RunView"], is_owner: bool) -> AsyncIterator[bytes]:
    """All that a page shows, as server-sent events, until it is closed."""
    seen = [_Seen() for _ in views]
    hello = {"runs": len(views), "owner": is_owner, "now": time.time()}
    yield _event("hello", 0, msgspec.json.encode(hello))
    quiet = 0
    while True:
        quiet += 1
        for number, view in enumerate(views):
            if view.is_stale:
                await asyncio.to_thread(view.refresh)
            for message in seen[number].news(number, view):
                quiet = 0
                yield message
        if quiet >= KEEPALIVE_TICKS:
            quiet = 0
            yield b": still here\n\n"
        await asyncio.sleep(TICK_SECONDS)


class _Seen:
    """How much of a run one page has been sent."""

    def __init__(self) -> None:
        self._sections: dict[str, bytes] = {}
        self._points, self._count = (-1, 0, 0), -1

    def news(self, number: int, view: "RunView") -> list[bytes]:
        """What it has not seen yet."""
        found, curves = [], view.curves
        has_more = (curves.generation, len(curves)) != (self._points[0], self._count)
        if has_more and (points := curves.points(*self._points)) is not None:
            self._points = points["generation"], points["size"], points["complete"]
            self._count = len(curves)
            found.append(_event("points", number, msgspec.json.encode(points)))
        for name, body in [*view.sections.items()]:  # a thread may add one
            if self._sections.get(name) is not body:
                self._sections[name] = body
                found.append(_event(name, number, body))
        return found


def _event(kind: str, run: int, body: bytes) -> bytes:
    return f'event: {kind}\ndata: {{"run":{run},"value":'.encode() + body + b"}\n\n"
