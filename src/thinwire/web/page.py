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
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from thinwire.errors import ThinwireError
from thinwire.web.server import has_token

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from thinwire.web.runs import RunView

STATIC = Path(__file__).parent / "static"
TICK_SECONDS = 1.0
KEEPALIVE_TICKS = 15  # without news, before a stream shows that it is there


class _Action(msgspec.Struct, forbid_unknown_fields=True):
    """What an owner wants done: a peer removed, or another invite for so many machines."""

    peer: Annotated[str, msgspec.Meta(min_length=1, max_length=63)] | None = None
    machines: Annotated[int, msgspec.Meta(ge=1)] = 1


def make_page(folders: Sequence[Path], is_own: bool = False) -> "Starlette":
    """The application that shows these runs. `is_own`: this process runs them."""
    from starlette.applications import Starlette
    from starlette.responses import FileResponse, JSONResponse, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    from thinwire.web.runs import RunView

    views = [RunView(folder, is_own) for folder in folders]

    async def page(request: "Request") -> "Response":
        return FileResponse(STATIC / "page.html")

    async def stream(request: "Request") -> "Response":
        events = _events(views, has_token(request.scope))
        return StreamingResponse(events, media_type="text/event-stream")

    async def act(request: "Request") -> "Response":
        """Ask the host of a run, for its owner."""
        if not has_token(request.scope):
            text = "only the address with its token may do this: the host's terminal shows it"
            return JSONResponse({"error": text}, 403)
        number, what = request.path_params["run"], request.url.path.split("/")[1]
        if number >= len(views):
            return JSONResponse({"error": "there is no such run"}, 404)
        try:
            asked = None
            if request.method == "POST":
                # Pages of other sites cannot send this type unasked.
                if request.headers.get("content-type", "").partition(";")[0] != "application/json":
                    raise ValueError("the request must be application/json")
                asked = msgspec.json.decode(await request.body(), type=_Action)
            folder = views[number].folder
            return JSONResponse(await asyncio.to_thread(_act, folder, what, asked))
        except (ThinwireError, ValueError) as error:  # what msgspec raises is a ValueError
            return JSONResponse({"error": str(error)}, 400)

    return Starlette(
        routes=[
            Route("/", page),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/stream", stream),
            Route("/invite/{run:int}", act, methods=["GET", "POST"]),
            Route("/kick/{run:int}", act, methods=["POST"]),
        ]
    )


def _act(folder: Path, what: str, asked: _Action | None) -> dict[str, Any]:
    import segno

    from thinwire.run.alive import ask

    if what == "kick":
        return ask(folder, {"ask": "kick", "peer": asked.peer if asked else None})
    line = ""
    if asked is not None:
        line = str(ask(folder, {"ask": "invite", "machines": asked.machines})["text"])
    else:
        ask(folder, {"ask": "status"})  # a run that has ended invites nobody
        with contextlib.suppress(OSError, UnicodeError):
            line = (folder / "authority" / "invite.txt").read_text().strip()
    code = segno.make(line, error="l", micro=False).svg_data_uri(scale=4, border=2) if line else ""
    return {"line": line, "qr": code}


async def _events(views: Sequence["RunView"], is_owner: bool) -> AsyncIterator[bytes]:
    """All that a page shows, as server-sent events, until it is closed."""
    seen: list[dict[str, bytes]] = [{} for _ in views]
    hello = {"runs": len(views), "owner": is_owner, "now": time.time()}
    yield _event("hello", 0, msgspec.json.encode(hello))
    quiet = 0
    while True:
        quiet += 1
        for number, view in enumerate(views):
            if view.is_stale:
                await asyncio.to_thread(view.refresh)
            for name, body in [*view.sections.items()]:  # a thread may add one
                if seen[number].get(name) is not body:
                    seen[number][name], quiet = body, 0
                    yield _event(name, number, body)
        if quiet >= KEEPALIVE_TICKS:
            quiet = 0
            yield b": still here\n\n"
        await asyncio.sleep(TICK_SECONDS)


def _event(kind: str, run: int, body: bytes) -> bytes:
    return f'event: {kind}\ndata: {{"run":{run},"value":'.encode() + body + b"}\n\n"
