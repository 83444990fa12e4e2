"""The model of a checkpoint over HTTP, with the interface of OpenAI's: one text at a time.

A second client waits for the first; one that goes away, or reads far more slowly than the model
writes, ends its text. Nobody waits for the reading of another. Every field of a request is checked.
Nothing here is for the open internet: there are no keys and no encryption, so it listens on this
machine alone unless told to.
"""

import collections
import contextlib
import functools
import io
import ipaddress
import json
import secrets
import select
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TextIO

import thinwire
from thinwire.errors import ConfigError, DataError, ThinwireError, printable
from thinwire.inference.text import Sampling, TextModel, Writing
from thinwire.run.signals import heeding

MOST_STOPS = 4
USUAL_TOKENS = 16  # of a completion, as OpenAI has it; a chat may fill the context
UNSUPPORTED = {
    "n": 1, "best_of": 1, "echo": False, "suffix": None, "logprobs": None, "top_logprobs": 0,
    "logit_bias": None, "presence_penalty": 0, "frequency_penalty": 0, "tools": None,
    "functions": None, "response_format": {"type": "text"},
}  # fmt: skip
"""What would change an answer and is not done here, with the value that asks for nothing."""


class RefusedError(Exception):
    """A request that is not served; becomes OpenAI's JSON error."""

    def __init__(self, text: str, status: int = 400, code: str | None = None, param: str = ""):
        super().__init__(text)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.plain = {
            "error": {"message": text, "type": kind, "param": param or None, "code": code}
        }


def read_request(
    body: Any, is_chat: bool, model: TextModel, name: str, most_tokens: int
) -> "ServedText":
    """The request in a body of JSON; RefusedError says which field is wrong."""
    if not isinstance(body, dict):
        raise RefusedError("the body must be a JSON object")
    if body.get("model", name) != name:
        text = f"the model {str(body['model'])[:100]!r} does not exist; this server has {name!r}"
        raise RefusedError(text, 404, "model_not_found", "model")
    for key, nothing in UNSUPPORTED.items():
        value = body.get(key)
        if value is not False and value not in (None, nothing, [], {}):
            raise RefusedError(f"{key} is not supported: leave it out", 400, "unsupported", key)
    if is_chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            text = "messages must be a list with at least one message"
            raise RefusedError(text, param="messages")
        try:
            ids = model.chat().prompt_ids(messages)
        except DataError as error:
            raise RefusedError(str(error), param="messages") from None
    else:
        prompt = body.get("prompt", "")
        prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
        if not isinstance(prompt, str):
            raise RefusedError("prompt must be one text", param="prompt")
        ids = model.encode(prompt)
    context = model.settings.model.context
    if len(ids) > context:
        text = f"the prompt has {len(ids)} tokens, but this model's context is {context} tokens"
        raise RefusedError(text, 400, "context_length_exceeded", "messages" if is_chat else "")
    usual = min(most_tokens, max(1, context - len(ids)) if is_chat else USUAL_TOKENS)
    asked = _number(body, "max_completion_tokens", None, 1, most_tokens, whole=True)
    options = body.get("stream_options")
    seed = _number(body, "seed", None, -(1 << 63), 1 << 63, whole=True)
    tokens = asked or _number(body, "max_tokens", usual, 1, most_tokens, whole=True)
    sampling = Sampling(
        temperature=_number(body, "temperature", 1.0, 0, 100),
        top_k=_number(body, "top_k", 0, 0, 1 << 31, whole=True),
        top_p=_number(body, "top_p", 1.0, 1e-9, 1),
        seed=secrets.randbits(48) if seed is None else seed,
    )
    ends = model.chat().end_ids if is_chat else ()
    return ServedText(
        writing=model.write(ids, tokens, sampling, ends, _stops(body.get("stop"))),
        prompt=len(ids),
        tokens=tokens,
        is_chat=is_chat,
        streams=body.get("stream") is True,
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
        model=name,
    )


@dataclass(frozen=True)
class ServedText:
    """A text that was asked for, in the shapes of OpenAI's answers: written while it is read."""

    writing: Writing
    prompt: int  # tokens
    tokens: int  # to write at most
    is_chat: bool
    streams: bool
    wants_usage: bool  # at the end of a stream
    model: str

    @functools.cached_property
    def _head(self) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind + (".chunk" if self.is_chat and self.streams else ""),
            "created": int(time.time()),
            "model": self.model,
        }

    def whole(self, is_wanted: Callable[[], bool]) -> dict[str, Any] | None:
        """All of it; None if nobody wants it any more."""
        text = ""
        for piece in self.writing:
            if not is_wanted():
                return None
            text += piece
        said = {"message": {"role": "assistant", "content": text}}
        return self._with(said if self.is_chat else {"text": text}, usage=True)

    def events(self, is_wanted: Callable[[], bool]) -> Iterator[str]:
        """Piece by piece, then how it ended."""
        if self.is_chat:
            yield json.dumps(self._with({"delta": {"role": "assistant", "content": ""}}, False))
        for piece in self.writing:
            if not is_wanted():
                return
            if piece:
                said = {"delta": {"content": piece}} if self.is_chat else {"text": piece}
                yield json.dumps(self._with(said, False))
        yield json.dumps(self._with({"delta": {}} if self.is_chat else {"text": ""}))
        if self.wants_usage:
            yield json.dumps({**self._head, "choices": [], "usage": self._usage()})
        yield "[DONE]"

    def _with(self, said: dict[str, Any], ended: bool = True, usage: bool = False) -> Any:
        reason = self.writing.ended_by if ended else None
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        return {**self._head, "choices": [choice], **({"usage": self._usage()} if usage else {})}

    def _usage(self) -> dict[str, int]:
        prompt, written = self.prompt, self.writing.count
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
        }


def _stops(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise RefusedError(f"stop must be a text or up to {MOST_STOPS} of them", param="stop")
    if not all(isinstance(each, str) and each for each in stops):
        raise RefusedError("stop must hold texts that are not empty", param="stop")
    return stops


def _number(
    body: dict[str, Any], key: str, usual: Any, least: float, most: float, whole: bool = False
) -> Any:
    value = body.get(key)
    if value is None:
        return usual
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # NaN is in no range
        raise RefusedError(f"{key} must be a number from {least:.15g} to {most:.15g}", param=key)
    if whole and value != int(value):
        raise RefusedError(f"{key} must be an integer", param=key)
    return int(value) if whole else float(value)


MOST_BYTES = 1 << 20  # of a request
MOST_WAITING = 16  # requests; more are refused
MOST_CONNECTIONS = 1024  # that the system keeps until they are accepted
MOST_UNREAD = 1 << 20  # bytes of a text that its client has not read, beyond what the system keeps
RETRY_SECONDS = 5  # what a client that is refused for now is told to wait
LAST_SECONDS = 10.0
SILENCE_SECONDS = 60.0  # for a client to send its request, or to take what it asked for
CHATS, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"


def run_server(
    model: TextModel, host: str, port: int, stream: TextIO, most_tokens: int = 0
) -> None:
    """Serve until a signal asks to end, or the model cannot go on."""
    with Server(model, host, port, most_tokens) as server:
        with heeding(lambda number, frame: server.is_over.set()):
            name = f"[{host}]" if ":" in host else host
            place = f"http://{name}:{server.server_port}/v1"
            stream.write(f"{server.name} is served at {place}; Ctrl-C ends it\n")
            stream.flush()
            thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
            thread.start()
            server.is_over.wait()
        server.shutdown()
        server.turns.wait_for_none(LAST_SECONDS)  # a text under way ends with its next token
    if server.failure is not None:
        raise server.failure
    stream.write(f"the server is closed; it answered {server.answered} requests\n")


class Turns:
    """Lets one in at a time, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: collections.deque[object] = collections.deque()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def wait_for_none(self, seconds: float) -> None:
        """Wait until nobody is in or waits, but no longer than this."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, seconds)

    @contextlib.contextmanager
    def next(self, most_waiting: int) -> Iterator[None]:
        """Wait for one's turn, which lasts as long as the context; RefusedError: too many wait."""
        me = object()
        with self._changed:
            if len(self._waiting) > most_waiting:
                raise RefusedError("too many requests wait: try again later", 503, "overloaded")
            self._waiting.append(me)
            self._changed.wait_for(lambda: self._waiting[0] is me)
        try:
            yield
        finally:
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()


class Server(ThreadingHTTPServer):
    """Has a thread for each connection; the model is used by one at a time.

    A request gets `most_tokens` at most, or as many as the model's context has.
    """

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, model: TextModel, host: str, port: int, most_tokens: int = 0):
        self.model = model
        self.most_tokens = most_tokens or model.settings.model.context
        self.name = f"{model.settings.run.name}-{model.checkpoint.step}"
        self.turns = Turns()
        self.is_over = threading.Event()
        self.failure: ThinwireError | None = None
        self.answered = 0
        model.tokenizer()  # a model that cannot write is refused before anybody asks
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on port {port} of {host}: {error.strerror or error}; choose "
                "another with --port or --listen"
            ) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of ours; others are shown by the default."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Unread(io.BufferedIOBase):
    """What is written to a client: taken at once, and sent as far as the client reads.

    So the model waits for nobody who reads slowly. `flush` waits, and it comes after one's turn.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._unread = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        """Take all of it; ConnectionAbortedError for a client that has left too much unread."""
        if len(self._unread) > MOST_UNREAD:
            self._unread.clear()
            raise ConnectionAbortedError("the client does not read what it asked for")
        self._unread += content
        self._connection.settimeout(0)
        try:
            with contextlib.suppress(BlockingIOError):
                del self._unread[: self._connection.send(self._unread)]
        finally:
            self._connection.settimeout(SILENCE_SECONDS)
        return len(content)

    def flush(self) -> None:
        """Send the rest, which may take as long as a client may be silent."""
        rest, self._unread = self._unread, bytearray()
        if rest:
            self._connection.sendall(rest)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    server_version = f"thinwire/{thinwire.__version__}"
    protocol_version = "HTTP/1.1"
    timeout = SILENCE_SECONDS
    disable_nagle_algorithm = True  # else each small write waits for the one before: 40 ms
    _is_streaming = False

    def setup(self) -> None:
        """Let writes wait for nobody."""
        super().setup()
        self.wfile = _Unread(self.connection)

    def parse_request(self) -> bool:
        """Read the head of a request; one that was meant for another host is refused.

        A server for this machine alone is asked for by a name of this machine. A browser that
        was led here by a foreign name (DNS rebinding) asks for that one, and would show the
        answer to the page it came from.
        """
        if not super().parse_request():
            return False
        here, asked = str(self.server.server_address[0]), self.headers.get("Host")
        if asked is None or not _is_loopback(here) or _is_loopback(_host_of(asked)):
            return True
        self.close_connection = True
        named = printable(asked, 100)
        self._refuse(RefusedError(f"this server is for this machine alone, not for {named}", 403))
        return False

    def do_GET(self) -> None:
        """The models there are: one."""
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # its body stays unread, and is no next request
        shown = {"id": self.server.name, "object": "model", "owned_by": "thinwire", "created": 0}
        if self.path == MODELS:
            self._reply(200, {"object": "list", "data": [shown]})
        elif self.path == f"{MODELS}/{self.server.name}":
            self._reply(200, shown)
        else:
            self._refuse(_unknown(self.path, CHATS, COMPLETIONS, MODELS))

    def do_POST(self) -> None:
        """Write a text."""
        try:
            body = self._body()  # also of what is refused: else it would be the next request
            if self.path not in (CHATS, COMPLETIONS):
                raise _unknown(self.path, CHATS, COMPLETIONS)
            server = self.server
            try:
                is_chat = self.path == CHATS
                asked = read_request(body, is_chat, server.model, server.name, server.most_tokens)
            except ThinwireError as error:  # such as a model without a chat template
                raise RefusedError(str(error)) from error
            with server.turns.next(MOST_WAITING):
                self._answer(asked)
            server.answered += 1
        except RefusedError as error:
            self._refuse(error)

    def _body(self) -> Any:
        """The JSON of a request; what is too long, or no JSON, is refused unread."""
        kind, length = self.headers.get_content_type(), self.headers.get("Content-Length", "")
        will_close, self.close_connection = self.close_connection, True  # with an unread body
        # Also keeps web pages of others out: a browser asks first before it sends JSON.
        if kind != "application/json":
            raise RefusedError(f"Content-Type must be application/json, not {kind}", 415)
        is_one = len(self.headers.get_all("Content-Length", [])) == 1
        if not is_one or not length.isdecimal() or "Transfer-Encoding" in self.headers:
            raise RefusedError("the request needs a Content-Length", 411)
        if len(length) > 10 or int(length) > MOST_BYTES:
            raise RefusedError(f"the request has more than {MOST_BYTES} bytes", 413)
        self.close_connection = will_close
        try:
            body = json.loads(self.rfile.read(int(length)))
            json.dumps(body, ensure_ascii=False).encode()  # "\\ud800" alone is no character
            return body
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"the body is not JSON: {printable(str(error), 200)}") from None

    def _answer(self, asked: ServedText) -> None:
        if self.server.is_over.is_set():  # the model may be gone
            raise RefusedError("the server is ending", 503)
        try:
            if asked.streams:
                self._start(200, "text/event-stream", None)
                for event in asked.events(self._is_wanted):
                    self.wfile.write(b"data: " + event.encode() + b"\n\n")
                return
            plain = asked.whole(self._is_wanted)
        except ThinwireError as error:  # such as a lost stage, which will not come back
            self.server.failure = error
            self.server.is_over.set()
            raise RefusedError("the model has failed", 500) from error
        if self.server.is_over.is_set():
            raise RefusedError("the server is ending", 503)
        if plain is not None:
            self._reply(200, plain)

    def _is_wanted(self) -> bool:
        """Whether to write on: the client is there, and the server has not been asked to end."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        is_gone = readable and not self.connection.recv(1, socket.MSG_PEEK)
        self.close_connection = self.close_connection or bool(is_gone)
        return not is_gone and not self.server.is_over.is_set()

    def _refuse(self, error: RefusedError) -> None:
        if self._is_streaming:
            self.wfile.write(b"data: " + json.dumps(error.plain).encode() + b"\n\n")
        else:
            self._reply(error.status, error.plain)

    def _reply(self, status: int, plain: dict[str, Any]) -> None:
        body = json.dumps(plain).encode()
        self._start(status, "application/json", len(body))
        self.wfile.write(body)

    def _start(self, status: int, kind: str, length: int | None) -> None:
        self.send_response(status, HTTPStatus(status).phrase)
        self.send_header("Content-Type", kind)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", str(RETRY_SECONDS))
        if length is None:
            self._is_streaming = self.close_connection = True
        else:
            self.send_header("Content-Length", str(length))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *values: Any) -> None:
        """Requests are not logged: they are texts of other people."""


def _unknown(path: str, *known: str) -> RefusedError:
    return RefusedError(f"there is no {printable(path, 100)} here, only {', '.join(known)}", 404)


def _host_of(named: str) -> str:
    """The host of a Host header, without its port: localhost:8000, [::1]:8000."""
    name = named.rpartition(":")[0] if named.rpartition(":")[2].isdecimal() else named
    return (name or named).strip("[]")


def _is_loopback(name: str) -> bool:
    if name.lower() == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return False
