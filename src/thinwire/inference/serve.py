"""The model of a checkpoint over HTTP, with the interface of OpenAI's.

A few texts are written at a time, a few more requests wait for their turn, and all others are told
to come back. A client that goes away, or reads far more slowly than the model writes, loses its
place: nobody waits for another. There are no keys and no encryption.
"""

import asyncio
import contextlib
import functools
import json
import re
import secrets
import threading
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Collection, Iterator
from typing import Annotated, Any, TextIO

import anyio
import msgspec
from anyio import to_thread
from anyio.abc import ObjectReceiveStream
from anyio.streams.memory import MemoryObjectSendStream
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from thinwire.errors import DataError, ThinwireError, printable
from thinwire.inference.model import Model, Sampling, Writing
from thinwire.run.signals import heeding
from thinwire.typed import learn_types
from thinwire.web.server import WebServer
from thinwire.wire.sockets import address_text

MOST_BYTES = 1 << 20  # of a request
MOST_UNREAD = 4096  # parts of a text, about 1 MiB, that its client has not read
RETRY_SECONDS = 5  # what a client that is refused for now is told to wait
LAST_SECONDS = 10  # for texts under way when the server ends: they end with their next token
SILENCE_SECONDS = 60.0  # for a client to send its request, or to take the rest of its text
USUAL_TOKENS = 16  # of a completion, as OpenAI has it; a chat may fill the context
CHATS, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
UNSUPPORTED = {
    "n": 1, "best_of": 1, "echo": False, "suffix": None, "logprobs": None, "top_logprobs": 0,
    "logit_bias": None, "presence_penalty": 0, "frequency_penalty": 0, "tools": None,
    "functions": None, "response_format": {"type": "text"}, "min_p": 0, "top_a": 0,
    "repetition_penalty": 1, "stop_token_ids": None, "ignore_eos": False,
}  # fmt: skip
"""What would change an answer and is not done here, with the value that asks for nothing."""


class RefusedError(HTTPException):
    """A request that is not served; becomes OpenAI's JSON error."""

    def __init__(self, text: str, status: int = 400, code: str | None = None, param: str = ""):
        is_for_now = status in (429, 503)
        super().__init__(status, text, {"Retry-After": str(RETRY_SECONDS)} if is_for_now else None)
        kind = "requests" if status == 429 else "invalid_request_error"
        kind = kind if status < 500 else "server_error"
        error = {"message": text, "type": kind, "param": param or None, "code": code}
        self.plain = {"error": error}

    def response(self) -> Response:
        """What the client gets instead of an answer."""
        return JSONResponse(self.plain, self.status_code, self.headers)


Parts = MemoryObjectSendStream[str | RefusedError]  # where a text goes as it is written
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Stop = Annotated[str, msgspec.Meta(min_length=1)]


class Asked(msgspec.Struct):
    """What is read of a request; null is as good as nothing, and what else there is is ignored."""

    model: str = ""
    prompt: str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=1)] = ""
    messages: list[Any] = []
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: Stop | Annotated[list[Stop], msgspec.Meta(max_length=4)] = []
    stream: bool = False
    stream_options: dict[str, Any] = {}

    @classmethod
    def read(cls, body: bytes) -> "Asked":
        """The request in a body of JSON; RefusedError says which field is wrong."""
        try:
            found = msgspec.json.decode(body, type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            text = f"the body must be a JSON object: {printable(str(error), 200)}"
            raise RefusedError(text) from None
        for key, nothing in UNSUPPORTED.items():
            value = found.get(key)
            if value is not False and value not in (None, nothing, [], {}):
                raise RefusedError(f"{key} is not supported: leave it out", 400, "unsupported", key)
        given = {
            key: int(value) if isinstance(value, float) and value.is_integer() else value
            for key, value in found.items()
            if value is not None
        }
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            reason, _, place = str(error).partition(" - at ")
            key = "".join(re.findall(r"\$\.(\w+)", place))
            raise RefusedError(f"{key}: {reason[0].lower()}{reason[1:]}", param=key) from None


learn_types(Asked)


def answer_parts(
    asked: Asked, is_chat: bool, writing: Writing, prompt: int, model: str
) -> Iterator[str]:
    """An answer as OpenAI shapes it, in parts, empty for nothing yet; `prompt` counts tokens."""
    kind, id_kind = ("chat.completion", "chatcmpl") if is_chat else ("text_completion", "cmpl")
    head = {
        "id": f"{id_kind}-{uuid.uuid4().hex}",
        "object": kind + (".chunk" if is_chat and asked.stream else ""),
        "created": int(time.time()),
        "model": model,
    }

    def part(said: dict[str, Any], reason: str | None = None, **usage: Any) -> str:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        return json.dumps({**head, "choices": [choice], **usage})

    def usage() -> dict[str, Any]:
        counts = {"prompt_tokens": prompt, "completion_tokens": writing.count}
        return {"usage": {**counts, "total_tokens": sum(counts.values())}}

    if not asked.stream:
        text = ""
        for piece in writing:
            text += piece
            yield ""
        message = {"role": "assistant", "content": text}
        whole = {"message": message} if is_chat else {"text": text}
        yield part(whole, writing.ended_by, **usage())
        return
    if is_chat:
        yield part({"delta": {"role": "assistant", "content": ""}})
    for piece in writing:
        more = {"delta": {"content": piece}} if is_chat else {"text": piece}
        yield part(more) if piece else ""
    yield part({"delta": {}} if is_chat else {"text": ""}, writing.ended_by)
    if asked.stream_options.get("include_usage") is True:
        yield json.dumps({**head, "choices": [], **usage()})
    yield "[DONE]"


def run_server(endpoint: "Endpoint", host: str, port: int, stream: TextIO) -> None:
    """Serve until a signal asks to end, or the model cannot go on."""
    listen = address_text(host, port)
    server = WebServer(lambda: endpoint.app, listen, patience=LAST_SECONDS, needs_token=False)
    with server, heeding(lambda number, frame: endpoint.is_over.set()):
        stream.write(f"{endpoint.name} is served at {server.address}v1; Ctrl-C ends it\n")
        stream.flush()
        endpoint.is_over.wait()
    if endpoint.failure is not None:
        raise endpoint.failure
    stream.write(f"the server is closed; it answered {endpoint.answered} requests\n")


class Endpoint:
    """The application that serves a model. A request gets `most_tokens` at most, or as many as the
    model's context has. `parallel` texts are under way at a time and `queue` requests wait.
    """

    def __init__(self, model: Model, most_tokens: int = 0, parallel: int = 1, queue: int = 16):
        self.model = model
        self.most_tokens = most_tokens or model.settings.model.context
        self.name = f"{model.settings.run.name}-{model.checkpoint.step}"
        self.is_over = threading.Event()
        self.failure: ThinwireError | None = None
        self.answered = 0
        self._parallel, self._most = parallel, parallel + queue
        self._model_in_use = asyncio.Lock()
        _ = model.tokenizer  # a model that cannot write is refused before anybody asks
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route(MODELS, self._models),
                Route(f"{MODELS}/{{name:path}}", self._models),
                Route(COMPLETIONS, self._write, methods=["POST"]),
                Route(CHATS, self._write, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _refused, Exception: _refused},
        )

    @functools.cached_property
    def _turns(self) -> anyio.CapacityLimiter:
        return anyio.CapacityLimiter(self._parallel)  # belongs to the loop of the server

    async def _health(self, request: Request) -> Response:
        if self.is_over.is_set():
            raise RefusedError("the server is ending", 503)
        state = self._turns.statistics()
        counts = {"writing": state.borrowed_tokens, "waiting": state.tasks_waiting}
        return JSONResponse({"status": "ok", **counts})

    async def _models(self, request: Request) -> Response:
        shown = {"id": self.name, "object": "model", "owned_by": "thinwire", "created": 0}
        if (name := request.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": [shown]})
        self._check_name(name)
        return JSONResponse(shown)

    def _check_name(self, asked: str) -> None:
        if asked != self.name:
            text = f"the model {asked[:100]!r} does not exist; this server has {self.name!r}"
            raise RefusedError(text, 404, "model_not_found", "model")

    async def _write(self, request: Request) -> ASGIApp:
        body, is_chat = await _body(request), request.url.path == CHATS
        try:
            asked, parts = await to_thread.run_sync(self._read, body, is_chat)
        except ThinwireError as error:  # such as a model without a chat template
            raise RefusedError(str(error)) from error
        return functools.partial(self._answer, asked.stream, parts)

    def _read(self, body: bytes, is_chat: bool) -> tuple[Asked, Iterator[str]]:
        """A request, and the parts of its answer; RefusedError says what is wrong with it."""
        asked, model, most = Asked.read(body), self.model, self.most_tokens
        self._check_name(asked.model or self.name)
        ends: Collection[int] = ()
        if not is_chat:
            ids = model.encode(asked.prompt if isinstance(asked.prompt, str) else asked.prompt[0])
        elif not asked.messages:
            text = "messages must be a list with at least one message"
            raise RefusedError(text, param="messages")
        else:
            try:
                ids, ends = model.chat.prompt_ids(asked.messages), model.chat.end_ids
            except DataError as error:
                raise RefusedError(str(error), param="messages") from None
        context = model.settings.model.context
        if len(ids) > context:
            text = f"the prompt has {len(ids)} tokens, but this model's context is {context} tokens"
            raise RefusedError(text, 400, "context_length_exceeded", "messages" if is_chat else "")
        usual = min(most, max(1, context - len(ids)) if is_chat else USUAL_TOKENS)
        tokens = asked.max_completion_tokens or asked.max_tokens or usual
        if tokens > most:
            text = f"a request gets {most} tokens at most, not {tokens}"
            raise RefusedError(text, param="max_tokens")
        seed = secrets.randbits(48) if asked.seed is None else asked.seed
        sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, seed)
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        writing = model.write(ids, tokens, sampling, ends, stops)
        return asked, answer_parts(asked, is_chat, writing, len(ids), self.name)

    async def _answer(
        self, streams: bool, text: Iterator[str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send a text as it is written; whoever goes away leaves the queue, or ends the text."""
        into, parts = anyio.create_memory_object_stream[str | RefusedError](MOST_UNREAD)
        async with into, parts, anyio.create_task_group() as tasks:
            tasks.start_soon(self._write_in_turn, text, into, tasks.cancel_scope)
            tasks.start_soon(_cancel_when_gone, receive, tasks.cancel_scope)
            first = await parts.receive()
            if isinstance(first, RefusedError):
                response = first.response()
            elif streams:
                response = StreamingResponse(_events(first, parts), media_type="text/event-stream")
            else:
                response = Response(first, media_type="application/json")
            self.answered += not isinstance(first, RefusedError)
            await response(scope, receive, send)
            tasks.cancel_scope.cancel()

    async def _write_in_turn(
        self, text: Iterator[str], into: Parts, answer: anyio.CancelScope
    ) -> None:
        """Write a text when it has its turn, however slowly it is read; or why it is refused."""
        with into, contextlib.suppress(anyio.WouldBlock):  # the client leaves too much unread
            try:
                state = self._turns.statistics()
                if (count := state.borrowed_tokens + state.tasks_waiting) >= self._most:
                    why = f"{count} requests are under way or wait: try again later"
                    raise RefusedError(why, 429, "rate_limit_exceeded")
                async with self._turns:
                    while (part := await self._next_part(text)) is not None:
                        if part:
                            into.send_nowait(part)
            except RefusedError as error:
                into.send_nowait(error)
        answer.deadline = anyio.current_time() + SILENCE_SECONDS

    async def _next_part(self, text: Iterator[str]) -> str | None:
        """What the next token adds; those under way take turns, token by token."""
        async with self._model_in_use:
            if self.is_over.is_set():
                raise RefusedError("the server is ending", 503)
            try:
                return await to_thread.run_sync(next, text, None)
            except ThinwireError as error:  # such as a model whose output is NaN
                self.failure = error
                self.is_over.set()
                raise RefusedError("the model has failed", 500) from error


async def _body(request: Request) -> bytes:
    """The body of a request; what is too long, or no JSON, is refused unread."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    # Also keeps web pages of others out: a browser asks first before it sends JSON.
    if kind != "application/json":
        text = f"Content-Type must be application/json, not {printable(kind, 100)}"
        raise RefusedError(text, 415)
    body = bytearray()
    try:
        with anyio.fail_after(SILENCE_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise RefusedError(f"the request has more than {MOST_BYTES} bytes", 413)
    except (TimeoutError, ClientDisconnect):
        text = f"the request did not come within {SILENCE_SECONDS:.0f} s"
        raise RefusedError(text, 408) from None
    return bytes(body)


async def _cancel_when_gone(receive: Receive, answer: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.cancel()


async def _events(first: str, parts: ObjectReceiveStream[str | RefusedError]) -> AsyncIterator[str]:
    """A text as server-sent events."""
    yield f"data: {first}\n\n"
    async for part in parts:
        said = json.dumps(part.plain) if isinstance(part, RefusedError) else part
        yield f"data: {said}\n\n"


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        traceback.print_exception(error)
        error = RefusedError("the server has failed", 500)
    elif not isinstance(error, RefusedError):
        asked = f"{request.method} {printable(request.url.path, 100)}"
        known = f"GET {MODELS}, POST {CHATS} and POST {COMPLETIONS}"
        error = RefusedError(f"there is no {asked} here, only {known}", error.status_code)
    return error.response()
