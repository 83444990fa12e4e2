"""The endpoint over real sockets: OpenAI's shapes, refusals, clients that wait or go away."""

import contextlib
import http.client
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import ConfigError, StageError
from thinwire.inference import Model, Sampling
from thinwire.inference.serve import MOST_BYTES, Server, read_request
from waiting import wait_until

JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "stage link"}]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    with Server(Model(folder, "cpu"), "127.0.0.1", 0, most_tokens=1_000_000) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.is_over.set()
            server.shutdown()
            server.turns.wait_for_none(20)


@pytest.fixture
def server(chatting: Callable) -> Iterator[Server]:
    with serving(chatting()) as found:
        yield found


def connect(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)


def ask(server: Server, path: str, body: Any, headers: dict = JSON) -> tuple[int, Any]:
    connection = connect(server)
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, text, headers)
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    kind = answer.headers.get_content_type()
    return answer.status, events(said) if kind == "text/event-stream" else json.loads(said)


def events(said: bytes) -> list[Any]:
    lines = said.decode().split("\n\n")
    assert lines.pop() == "" and lines.pop() == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_the_model_is_listed(server: Server) -> None:
    connection = connect(server)
    for path, at in (("/v1/models", ["data", 0]), (f"/v1/models/{server.name}", [])):
        connection.request("GET", path)  # twice on one connection
        found = json.loads(connection.getresponse().read())
        for key in at:
            found = found[key]
        assert found["id"] == server.name == "test-0" and found["object"] == "model"
    connection.request("GET", "/v1/nothing")
    answer = connection.getresponse()
    assert answer.status == 404 and "only /v1" in json.loads(answer.read())["error"]["message"]
    connection.request("POST", "/v1/embeddings", b'{"input": "x"}', JSON)
    refused = connection.getresponse()
    assert (refused.status, refused.read() != b"") == (404, True)
    connection.request("GET", "/v1/models")  # what a refused request brought is no next request
    assert connection.getresponse().status == 200
    with pytest.raises(ConfigError, match=f"cannot listen on port {server.server_port}"):
        Server(server.model, "127.0.0.1", server.server_port)


def test_a_completion_is_what_the_model_writes(server: Server) -> None:
    request = {"model": server.name, "prompt": "stage ", "max_tokens": 12, "temperature": 0.9,
               "top_p": 0.8, "seed": 5}  # fmt: skip
    status, whole = ask(server, "/v1/completions", request)
    model = server.model
    wanted = model.write(model.encode("stage "), 12, Sampling(0.9, 0, 0.8, 5))
    text = "".join(wanted)
    assert status == 200 and whole["object"] == "text_completion" and text
    assert whole["choices"] == [
        {"index": 0, "text": text, "logprobs": None, "finish_reason": wanted.ended_by}
    ]
    prompt = len(model.encode("stage "))
    assert whole["usage"] == {"prompt_tokens": prompt, "completion_tokens": wanted.count,
                              "total_tokens": prompt + wanted.count}  # fmt: skip
    status, parts = ask(server, "/v1/completions", {**request, "stream": True})
    assert status == 200 and "".join(part["choices"][0]["text"] for part in parts) == text
    assert [p["choices"][0]["finish_reason"] for p in parts[-2:]] == [None, wanted.ended_by]
    assert len({part["id"] for part in parts}) == 1 and "usage" not in parts[-1]


def test_a_chat_answers_by_the_template(server: Server) -> None:
    request = {"messages": HELLO, "max_tokens": 9, "temperature": 0}
    status, whole = ask(server, "/v1/chat/completions", request)
    text = "".join(server.model.answer(HELLO, 9, Sampling(0)))
    assert status == 200 and whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}
    parts_of_text = [{"role": "user", "content": [{"type": "text", "text": "stage link"}]}]
    stream = {**request, "messages": parts_of_text, "stream": True,
              "stream_options": {"include_usage": True}}  # fmt: skip
    _, (first, *parts, last, usage) = ask(server, "/v1/chat/completions", stream)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == text
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert {part["object"] for part in (first, *parts, last)} == {"chat.completion.chunk"}


REFUSED = [
    ("completions", b"{", 400, "the body is not JSON"),
    ("completions", b"[" * 100_000, 400, "the body is not JSON"),
    ("completions", b"\xff\xfe", 400, "the body is not JSON"),
    ("completions", b'{"prompt": "\\ud800"}', 400, "the body is not JSON"),
    ("completions", b'{"seed": 1' + b"0" * 400 + b"}", 400, "seed must be a number"),
    ("completions", b'{"temperature": NaN}', 400, "temperature must be a number"),
    ("completions", b'{"top_p": 1e999}', 400, "top_p must be a number"),
    ("completions", [], 400, "must be a JSON object"),
    ("completions", {"model": "gpt-9"}, 404, "the model 'gpt-9' does not exist"),
    ("completions", {"prompt": 5}, 400, "prompt must be one text"),
    ("completions", {"prompt": ["a", "b"]}, 400, "prompt must be one text"),
    ("completions", {"prompt": "stage " * 200}, 400, "context is 128 tokens"),
    ("completions", {"max_tokens": 0}, 400, "max_tokens must be a number from 1"),
    ("completions", {"max_tokens": 1.5}, 400, "max_tokens must be an integer"),
    ("completions", {"max_tokens": 1_000_001}, 400, "a number from 1 to 1000000"),
    ("chat/completions", {"messages": HELLO, "max_completion_tokens": 1 << 20}, 400, "to 1000000"),
    ("completions", {"temperature": -1}, 400, "temperature must be a number from 0"),
    ("completions", {"temperature": True}, 400, "temperature must be a number"),
    ("completions", {"top_p": 0}, 400, "top_p must be a number"),
    ("completions", {"seed": 1 << 70}, 400, "seed must be a number"),
    ("completions", {"stop": ["a"] * 5}, 400, "up to 4"),
    ("completions", {"stop": [""]}, 400, "not empty"),
    ("completions", {"n": 2}, 400, "n is not supported"),
    ("completions", {"logprobs": 3}, 400, "logprobs is not supported"),
    ("chat/completions", {}, 400, "messages must be a list"),
    ("chat/completions", {"messages": ["hi"]}, 400, "message 1 is not an object"),
    ("chat/completions", {"messages": [{"content": "a"}]}, 400, "message 1 has the role None"),
    ("chat/completions", {"messages": [{"role": "?", "content": "a"}]}, 400, "no conversation"),
    ("chat/completions", {"messages": [{"role": "user", "content": [1]}]}, 400, "else than text"),
    ("chat/completions", {"messages": HELLO, "tools": [{}]}, 400, "tools is not supported"),
    ("embeddings", {}, 404, "there is no /v1/embeddings here"),
]  # fmt: skip


def test_refusals_say_why_and_harm_nothing(server: Server) -> None:
    for path, body, status, words in REFUSED:
        found, said = ask(server, f"/v1/{path}", body)
        assert found == status and words in said["error"]["message"], (words, said)
        assert said["error"]["type"] == "invalid_request_error"


def test_what_is_too_long_or_of_another_kind_is_not_read(server: Server) -> None:
    refused = [
        ({**JSON, "Content-Length": str(MOST_BYTES + 1)}, 413),
        ({**JSON, "Content-Length": "9" * 5000}, 413),
        ({"Content-Type": "text/plain", "Content-Length": "2"}, 415),
        ({**JSON, "Transfer-Encoding": "chunked"}, 411),
        ({**JSON, "Content-Length": "-1"}, 411),
    ]
    for headers, status in refused:
        connection = connect(server)
        connection.putrequest("POST", "/v1/completions")
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()  # and no body: the answer must not wait for one
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Connection"]) == (status, "close")
        connection.close()
    assert ask(server, "/v1/completions", {"max_tokens": 2})[0] == 200, "an empty prompt is one"


def without_end(server: Server) -> None:
    """Let no text end by itself: a fresh model says the end of text after some 300 tokens."""
    model = server.model
    chosen, end = model.tokens_behind, model.tokenizer().end_of_text
    model.tokens_behind = lambda *a: (token for token in chosen(*a) if token != end)


def raw_request(server: Server, body: dict) -> socket.socket:
    """A client whose connection can be cut off."""
    text = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", server.server_port), timeout=30)
    client.sendall(head.encode() + text)
    return client


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_text(server: Server, stream: bool) -> None:
    """It asked for a million tokens: only because it is gone can the next client be served."""
    without_end(server)
    gone = raw_request(server, {"max_tokens": 1_000_000, "stream": stream})
    wait_until(lambda: len(server.turns) == 1)
    if stream:
        assert gone.recv(100).startswith(b"HTTP/1.1 200")
    gone.close()
    assert ask(server, "/v1/completions", {"max_tokens": 3})[0] == 200


def test_two_clients_are_served_one_after_the_other(server: Server) -> None:
    without_end(server)
    first = raw_request(server, {"max_tokens": 1_000_000, "stream": True})
    wait_until(lambda: len(server.turns) == 1)
    answers: list[tuple[int, Any]] = []
    request = {"prompt": "link", "max_tokens": 4, "temperature": 0}
    second = threading.Thread(
        target=lambda: answers.append(ask(server, "/v1/completions", request))
    )
    second.start()
    wait_until(lambda: len(server.turns) == 2)
    assert not answers, "the first one is still being served"
    first.close()
    second.join(30)
    ((status, said),) = answers
    model = server.model
    assert status == 200
    assert said["choices"][0]["text"] == "".join(model.write(model.encode("link"), 4, Sampling(0)))


def test_too_many_that_wait_are_told_when_to_come_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many come at once: none is reset."""
    monkeypatch.setattr("thinwire.inference.serve.MOST_WAITING", 0)
    without_end(server)
    first = raw_request(server, {"max_tokens": 1_000_000, "stream": True})
    wait_until(lambda: len(server.turns) == 1)
    server.shutdown()  # nobody is accepted for now
    others = [raw_request(server, {}) for _ in range(100)]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    for other in others:
        said = b""
        while b"}}" not in said:
            piece = other.recv(1000)
            assert piece, "the connection was closed without a word"
            said += piece
        assert said.startswith(b"HTTP/1.1 503") and b"Retry-After: 5" in said
        assert b'"code": "overloaded"' in said
        other.close()
    first.close()


def test_nobody_waits_for_a_client_that_does_not_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for a million tokens, reads next to none of them, and loses its connection."""
    monkeypatch.setattr("thinwire.inference.serve.MOST_UNREAD", 10_000)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server.model.tokens_behind = lambda *_: itertools.repeat(70)
    slow = raw_request(server, {"max_tokens": 1_000_000, "stream": True})
    said = slow.recv(12)
    assert said == b"HTTP/1.1 200"
    assert ask(server, "/v1/completions", {"max_tokens": 3})[0] == 200
    with contextlib.suppress(ConnectionError):
        while piece := slow.recv(1 << 16):
            said += piece
    assert b"[DONE]" not in said
    slow.close()


def test_a_request_gets_as_many_tokens_as_the_context_has_unless_told_otherwise(
    chatting: Callable,
) -> None:
    model = Model(chatting(), "cpu")
    with Server(model, "127.0.0.1", 0) as server:
        assert server.most_tokens == model.settings.model.context == 128
        for chat in (True, False):
            body = {"messages": HELLO} if chat else {"prompt": "a"}
            assert read_request(body, chat, model, "x", 7).tokens == 7


def test_the_end_of_the_server_ends_a_text(chatting: Callable) -> None:
    with serving(chatting()) as server:
        without_end(server)
        client = raw_request(server, {"max_tokens": 1_000_000})
        wait_until(lambda: len(server.turns) == 1)
        server.is_over.set()
        assert client.recv(1000).startswith(b"HTTP/1.1 503")
        wait_until(lambda: not len(server.turns))


@pytest.mark.parametrize("stream", [True, False])
def test_a_model_that_fails_ends_the_server(
    server: Server, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*arguments: Any) -> Iterator[int]:
        yield 70
        raise StageError("stage 1 was killed")

    monkeypatch.setattr(server.model, "tokens_behind", lost)
    client = raw_request(server, {"max_tokens": 5, "stream": stream})
    said = b""
    while piece := client.recv(1000):
        said += piece
        if b"has failed" in said:
            break
    assert said.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 500")
    wait_until(server.is_over.is_set)
    assert isinstance(server.failure, StageError) and b"killed" not in said


def test_a_model_without_a_chat_template_says_so(chatting: Callable) -> None:
    with serving(chatting(special=())) as server:
        status, said = ask(server, "/v1/chat/completions", {"messages": HELLO})
        assert status == 400 and "chat template" in said["error"]["message"]
        assert ask(server, "/v1/completions", {"prompt": "a"})[0] == 200


def test_only_names_of_this_machine_are_served(server: Server) -> None:
    """A page of another host gets no answer."""
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:9", "[::1]:80", "[::1]"):
        connection = connect(server)
        connection.request("GET", "/v1/models", headers={"Host": host})
        assert connection.getresponse().status == 200
        connection.close()
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example"):
        for path, body in (("/v1/models", None), ("/v1/completions", b'{"prompt": "x"}')):
            connection = connect(server)
            connection.request("POST" if body else "GET", path, body, {**JSON, "Host": host})
            answer = connection.getresponse()
            assert answer.status == 403 and host in json.loads(answer.read())["error"]["message"]
            connection.close()
