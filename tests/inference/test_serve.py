"""The endpoint over real sockets: OpenAI's shapes, refusals, clients that wait or go away."""

import contextlib
import io
import itertools
import json
import re
import socket
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from thinwire.errors import CheckpointError
from thinwire.inference import Model, Sampling
from thinwire.inference.serve import MOST_BYTES, Endpoint, run_server
from thinwire.web.server import WebServer
from waiting import wait_until

HELLO = [{"role": "user", "content": "stage link"}]


class Served:
    """An endpoint with its server, and a client of it."""

    def __init__(self, endpoint, server):
        self.endpoint, self.model, self.port = endpoint, endpoint.model, server.port
        self.socket = server._socket
        self.client = httpx.Client(base_url=server.address, timeout=60, trust_env=False)

    def ask(self, path, body):
        """The status and the JSON of an answer, or its events."""
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        answer = self.client.post(f"/v1/{path}", content=text, headers=headers)
        kind = answer.headers["Content-Type"].partition(";")[0]
        return answer.status_code, events(answer) if kind == "text/event-stream" else answer.json()

    def is_with(self, writing, waiting):
        """Whether so many texts are under way, and so many requests wait."""
        state = self.client.get("/health").json()
        return (state["writing"], state["waiting"]) == (writing, waiting)

    def raw(self, body):
        """A client whose connection can be cut off."""
        text = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        )
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", self.port))
        client.sendall(head.encode() + text)
        return client

    def without_end(self):
        """Let no text end by itself: a fresh model says the end of text after some 300 tokens."""
        chosen, end = self.model.tokens_behind, self.model.tokenizer.end_of_text
        self.model.tokens_behind = lambda *a: (token for token in chosen(*a) if token != end)


@contextlib.contextmanager
def serving(folder, parallel=1, queue=16):
    endpoint = Endpoint(Model(folder, "cpu"), 1_000_000, parallel, queue)
    with WebServer(lambda: endpoint.app, "127.0.0.1:0", patience=20) as server:
        served = Served(endpoint, server)
        try:
            yield served
        finally:
            served.client.close()
            endpoint.is_over.set()


@pytest.fixture
def server(chatting):
    with serving(chatting()) as found:
        yield found


def events(answer):
    lines = answer.text.split("\n\n")
    assert lines.pop() == "" and lines.pop() == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_the_model_is_listed(server):
    name = server.endpoint.name
    (listed,) = server.client.get("/v1/models").json()["data"]
    assert listed == server.client.get(f"/v1/models/{name}").json()
    assert listed["id"] == name == "test-0" and listed["object"] == "model"
    assert server.client.get("/v1/models/gpt-9").json()["error"]["code"] == "model_not_found"
    assert server.client.get("/health").json() == {"status": "ok", "writing": 0, "waiting": 0}


def test_a_completion_is_what_the_model_writes(server):
    request = {"model": server.endpoint.name, "prompt": "stage ", "max_tokens": 12,
               "temperature": 0.9, "top_p": 0.8, "seed": 5}  # fmt: skip
    status, whole = server.ask("completions", request)
    model = server.model
    wanted = model.write(model.encode("stage "), 12, Sampling(0.9, 0, 0.8, 5))
    text = "".join(wanted)
    assert status == 200 and whole["object"] == "text_completion" and text
    ended = {"logprobs": None, "finish_reason": wanted.ended_by}
    assert whole["choices"] == [{"index": 0, "text": text, **ended}]
    prompt = len(model.encode("stage "))
    assert whole["usage"] == {"prompt_tokens": prompt, "completion_tokens": wanted.count,
                              "total_tokens": prompt + wanted.count}  # fmt: skip
    status, parts = server.ask("completions", {**request, "stream": True, "n": 1, "stop": None})
    assert status == 200 and "".join(part["choices"][0]["text"] for part in parts) == text
    assert [p["choices"][0]["finish_reason"] for p in parts[-2:]] == [None, wanted.ended_by]
    assert len({part["id"] for part in parts}) == 1 and "usage" not in parts[-1]
    assert server.endpoint.answered == 2


def test_a_chat_answers_by_the_template(server):
    request = {"messages": HELLO, "max_tokens": 9.0, "temperature": 0}
    status, whole = server.ask("chat/completions", request)
    text = "".join(server.model.answer(HELLO, 9, Sampling(0)))
    assert status == 200 and whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}
    parts_of_text = [{"role": "user", "content": [{"type": "text", "text": "stage link"}]}]
    stream = {**request, "messages": parts_of_text, "stream": True,
              "stream_options": {"include_usage": True}}  # fmt: skip
    _, (first, *parts, last, usage) = server.ask("chat/completions", stream)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == text
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert {part["object"] for part in (first, *parts, last)} == {"chat.completion.chunk"}


REFUSED = [
    ("completions", b"{", 400, "must be a JSON object"),
    ("completions", b'{"prompt": "\\ud800"}', 400, "must be a JSON object"),
    ("completions", b'{"temperature": NaN}', 400, "must be a JSON object"),
    ("completions", b" " * (MOST_BYTES + 1), 413, "more than 1048576 bytes"),
    ("completions", [], 400, "must be a JSON object"),
    ("completions", {"model": "gpt-9"}, 404, "the model 'gpt-9' does not exist"),
    ("completions", {"prompt": ["a", "b"]}, 400, "prompt: expected `array` of length <= 1"),
    ("completions", {"prompt": "stage " * 200}, 400, "context is 128 tokens"),
    ("completions", {"max_tokens": 0}, 400, "max_tokens: expected `int` >= 1"),
    ("completions", {"max_tokens": 1_000_001}, 400, "1000000 tokens at most, not 1000001"),
    ("chat/completions", {"messages": HELLO, "max_completion_tokens": 1 << 20}, 400, "1000000 tok"),
    ("completions", {"temperature": -1}, 400, "temperature: expected `float` >= 0"),
    ("completions", {"top_p": 0}, 400, "top_p: expected `float` > 0"),
    ("completions", {"stop": ["a"] * 5}, 400, "length <= 4"),
    ("completions", {"n": 2}, 400, "n is not supported"),
    ("completions", {"repetition_penalty": 1.1}, 400, "repetition_penalty is not supported"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "message 1 has no content"),
    ("chat/completions", {}, 400, "messages must be a list"),
    ("chat/completions", {"messages": [{"role": "?", "content": "a"}]}, 400, "no conversation"),
    ("chat/completions", {"messages": [{"role": "user", "content": [1]}]}, 400, "else than text"),
    ("chat/completions", {"messages": HELLO, "tools": [{}]}, 400, "tools is not supported"),
    ("embeddings", {}, 404, "there is no POST /v1/embeddings here"),
]  # fmt: skip


def test_refusals_say_why_and_harm_nothing(server):
    for path, body, status, words in REFUSED:
        found, said = server.ask(path, body)
        assert found == status and words in said["error"]["message"], (words, said)
        assert said["error"]["type"] == "invalid_request_error"
    form = server.client.post("/v1/completions", data={"prompt": "a"})
    assert form.status_code == 415 and "application/json" in form.json()["error"]["message"]
    said = server.client.get("/v1/completions")
    assert said.status_code == 405 and "POST /v1/completions" in said.json()["error"]["message"]
    assert server.ask("completions", {"max_tokens": 2})[0] == 200, "an empty prompt is one"


def test_a_client_that_goes_away_ends_its_text(server):
    """It asked for a million tokens: only because it is gone can the next client be served."""
    server.without_end()
    gone = server.raw({"max_tokens": 1_000_000})
    wait_until(lambda: server.is_with(writing=1, waiting=0))
    gone.close()
    assert server.ask("completions", {"max_tokens": 3})[0] == 200


def test_requests_wait_in_order_and_those_whose_client_goes_away_leave(server):
    server.without_end()
    first = server.raw({"max_tokens": 1_000_000, "stream": True})
    wait_until(lambda: server.is_with(writing=1, waiting=0))
    begun, model = [], server.model
    chosen = model.tokens_behind

    def noted(ids, *rest):
        begun.append(model.tokenizer.decode(ids))
        yield from chosen(ids, *rest)

    def ask(prompt):
        _, said = server.ask("completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0})
        return said["choices"][0]["text"]

    model.tokens_behind = noted
    with ThreadPoolExecutor() as pool:
        answers: dict[str, Future[str]] = {}
        for number, prompt in enumerate(("link", "stage", "wire")):
            gone = server.raw({"max_tokens": 1_000_000})
            wait_until(lambda number=number: server.is_with(writing=1, waiting=number + 1))
            gone.close()
            wait_until(lambda number=number: server.is_with(writing=1, waiting=number))
            answers[prompt] = pool.submit(ask, prompt)
            wait_until(lambda number=number: server.is_with(writing=1, waiting=number + 1))
        assert not begun, "the first one is still being served"
        first.close()
        said = {prompt: answer.result(60) for prompt, answer in answers.items()}
    assert begun == list(answers)
    for prompt, text in said.items():
        assert text == "".join(model.write(model.encode(prompt), 4, Sampling(0)))
    wait_until(lambda: server.is_with(writing=0, waiting=0))


def test_those_who_find_the_queue_full_are_told_when_to_come_back(chatting):
    with serving(chatting(), queue=1) as server:
        server.without_end()
        under_way = [server.raw({"max_tokens": 1_000_000, "stream": True}) for _ in range(2)]
        wait_until(lambda: server.is_with(writing=1, waiting=1))
        with ThreadPoolExecutor(20) as pool:
            said = pool.map(lambda _: server.client.post("/v1/completions", json={}), range(40))
        for answer in said:
            assert (answer.status_code, answer.headers["Retry-After"]) == (429, "5")
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        for one in under_way:
            one.close()
        assert server.ask("completions", {"max_tokens": 3})[0] == 200


def test_texts_in_parallel_are_those_that_are_written_alone(chatting):
    """They take turns token by token: one that is asked for later need not wait for the first."""
    with serving(chatting(), parallel=3, queue=0) as server:
        server.without_end()
        prompts = ("stage ", "link")
        model, sampling = server.model, Sampling(0.9, 0, 1, 5)
        wanted = ["".join(model.write(model.encode(one), 15, sampling)) for one in prompts]
        endless = server.raw({"max_tokens": 1_000_000})
        wait_until(lambda: server.is_with(writing=1, waiting=0))
        asked = [{"prompt": prompt, "max_tokens": 15, "temperature": 0.9, "seed": 5}
                 for prompt in prompts]  # fmt: skip
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda body: server.ask("completions", body), asked))
        assert [said["choices"][0]["text"] for _, said in answers] == wanted
        assert server.is_with(writing=1, waiting=0)
        endless.close()


def test_nobody_waits_for_a_client_that_does_not_read(server, monkeypatch):
    """It asks for a million tokens, reads next to none of them, and loses its connection."""
    monkeypatch.setattr("thinwire.inference.serve.MOST_UNREAD", 16)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server.model.tokens_behind = lambda *_: itertools.repeat(70)
    slow = server.raw({"max_tokens": 1_000_000, "stream": True})
    said = slow.recv(12)
    assert said == b"HTTP/1.1 200"
    assert server.ask("completions", {"max_tokens": 3})[0] == 200
    with contextlib.suppress(ConnectionError):
        while (piece := slow.recv(1 << 16)) and not said.endswith(b"0\r\n\r\n"):
            said += piece
    assert b"[DONE]" not in said
    slow.close()


def test_the_end_of_the_server_ends_texts_and_empties_the_queue(chatting):
    with serving(chatting()) as server:
        server.without_end()
        clients = [server.raw({"max_tokens": 1_000_000}) for _ in range(3)]
        wait_until(lambda: server.is_with(writing=1, waiting=2))
        server.endpoint.is_over.set()
        for client in clients:
            assert client.recv(1000).startswith(b"HTTP/1.1 503")
        assert server.client.get("/health").status_code == 503


@pytest.mark.parametrize("stream", [True, False])
def test_a_model_that_fails_ends_the_server(chatting, stream):
    def lost(*arguments):
        yield 70
        raise CheckpointError("the output is NaN")

    model, printed = Model(chatting(), "cpu"), io.StringIO()
    model.tokens_behind = lost

    def ask():
        wait_until(lambda: "Ctrl-C" in printed.getvalue())
        (address,) = re.findall("test-0 is served at (http://[^;]+)", printed.getvalue())
        body = {"max_tokens": 5, "stream": stream}
        return httpx.post(f"{address}/completions", json=body, timeout=60, trust_env=False)

    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask)
        with pytest.raises(CheckpointError, match="NaN"):
            run_server(Endpoint(model), "127.0.0.1", 0, printed)
        said = answer.result(60)
    assert said.status_code == (200 if stream else 500)
    assert "has failed" in said.text and "NaN" not in said.text


def test_a_model_without_a_chat_template_says_so(chatting):
    with serving(chatting(special=())) as server:
        status, said = server.ask("chat/completions", {"messages": HELLO})
        assert status == 400 and "chat template" in said["error"]["message"]
        assert server.ask("completions", {"prompt": "a"})[0] == 200


def test_pages_of_other_sites_get_nothing_and_other_machines_need_no_key(server):
    def status(base, **headers):
        return httpx.get(f"{base}v1/models", headers=headers, trust_env=False).status_code

    here = f"http://127.0.0.1:{server.port}/"
    assert (status(here), status(here, Host="localhost")) == (200, 200)
    assert status(here, Host="evil.example") == status(here, Origin="http://evil.example") == 403
    app = server.endpoint.app
    with WebServer(lambda: app, "0.0.0.0:0", needs_token=False) as on_all:
        there = f"http://127.0.0.1:{on_all.port}/"
        assert (status(there), status(there, Host="gpu.example")) == (200, 200)
        assert status(there, Origin="http://evil.example") == 403
