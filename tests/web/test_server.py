"""The server that pages share, over real connections."""

import socket
import subprocess
import sys
import threading

import httpx
import pytest

from thinwire.errors import ConfigError
from thinwire.web.server import WebServer, has_token
from waiting import wait_until

TOKEN = "t0ken"


def make_app():
    """Says who asks; /forever never ends."""

    async def app(scope, receive, send):
        import asyncio

        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = b"owner" if has_token(scope) else b"guest"
        await send({"type": "http.response.body", "body": body, "more_body": True})
        if scope["path"] == "/forever":
            await asyncio.sleep(3600)
        await send({"type": "http.response.body", "body": b""})

    return app


@pytest.fixture
def private():
    with WebServer(make_app, "127.0.0.1:0", TOKEN) as server:
        yield server


@pytest.fixture
def public():
    with WebServer(make_app, "0.0.0.0:0", TOKEN) as server:
        yield server


def local(server):
    return f"http://127.0.0.1:{server.port}/"


def test_a_private_server_answers_this_machine_and_refuses_a_foreign_name(private):
    answer = httpx.get(private.address)
    assert (answer.status_code, answer.text) == (200, "guest")
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert answer.headers["referrer-policy"] == "no-referrer"
    named = {"Host": f"localhost:{private.port}"}
    assert httpx.get(private.address, headers=named).status_code == 200
    answer = httpx.get(private.address, headers={"Host": f"evil.example:{private.port}"})
    assert answer.status_code == 403 and "own machine" in answer.text


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_page_of_another_site_is_refused(private, origin):
    headers = {"Origin": origin, "Authorization": f"Bearer {TOKEN}"}
    assert httpx.post(private.address, headers=headers).status_code == 403
    headers["Origin"] = private.address.rstrip("/")
    assert httpx.post(private.address, headers=headers).text == "owner"


def test_elsewhere_a_request_shows_the_token(public):
    wrong, right = {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {TOKEN}"}
    for shown in ({}, {"params": {"token": "wrong"}}, {"headers": wrong}):
        answer = httpx.get(local(public), **shown)
        assert answer.status_code == 403 and "token" in answer.text
    named = {"Host": "any.name", **right}
    for shown in ({"params": {"token": TOKEN}}, {"headers": right}, {"headers": named}):
        assert httpx.get(local(public), **shown).text == "owner"


def test_a_browser_keeps_the_token_as_a_cookie(public):
    with httpx.Client(headers={"Accept": "text/html"}) as browser:
        first = browser.get(local(public), params={"token": TOKEN, "x": "1"})
        assert (first.status_code, first.headers["location"]) == (303, "/?x=1")
        assert "HttpOnly" in first.headers["set-cookie"]
        away = browser.get(local(public) + "/evil.example/", params={"token": TOKEN})
        assert away.headers["location"] == "/evil.example/"
        assert browser.get(local(public)).text == "owner"
    assert public.address_with_token == f"{public.address}?token={TOKEN}"


def test_a_port_that_is_taken():
    with WebServer(make_app, "127.0.0.1:0") as first:
        with pytest.raises(ConfigError, match="in use by another process"):
            WebServer(make_app, f"127.0.0.1:{first.port}")
        with WebServer(make_app, f"127.0.0.1:{first.port}", takes_next_port=True) as second:
            assert second.port != first.port
            assert httpx.get(second.address).text == "guest"
    with pytest.raises(ConfigError, match="name an address of this machine"):
        WebServer(make_app, "192.0.2.1:0")


def test_closing_ends_answers_that_would_not_end_and_frees_the_port():
    server = WebServer(make_app, "127.0.0.1:0").start()
    with httpx.stream("GET", server.address + "forever") as answer:
        assert next(answer.iter_text()) == "guest"
        server.close()  # though the answer goes on for an hour
    server.close()
    wait_until(lambda: "thinwire web" not in [thread.name for thread in threading.enumerate()])
    socket.create_server(("127.0.0.1", server.port)).close()


def test_who_listens_without_being_asked_imports_no_server():
    script = (
        "import sys\n"
        "from thinwire.web.server import WebServer\n"
        "with WebServer(lambda: None, '127.0.0.1:0'): pass\n"
        "print([name for name in ('uvicorn', 'starlette', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
