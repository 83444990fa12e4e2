"""generate and serve as a user runs them: a conversation, options that contradict, a signal."""

import http.client
import io
import json
import re
import sys

import pytest

from programs import Program
from thinwire.inference import Model, Sampling


@pytest.fixture
def say(command, monkeypatch):
    """How `generate` ends, what it prints, and its errors, with lines typed into it."""

    def run(typed, *arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        return command("generate", *arguments, "--device", "cpu")

    return run


def test_a_conversation_remembers_what_was_said(chatting, say):
    folder = chatting()
    model, messages, wanted = Model(folder, "cpu"), [{"role": "system", "content": "be"}], []
    for line in ("stage", "link"):
        messages.append({"role": "user", "content": line})
        wanted.append("".join(model.answer(messages, 6, Sampling(0.8, 40, 0.9, 4))))
        messages.append({"role": "assistant", "content": wanted[-1]})
    options = ("--chat", "--tokens", 6, "--seed", 4, "--top-p", 0.9, "--system", "be")
    _, said, _ = say("stage\n\n  link \n", folder, *options)
    assert said == "".join(f"{text}\n" for text in wanted)
    assert say("", folder, *options, "--prompt", "stage")[1] == f"{wanted[0]}\n"


@pytest.mark.parametrize("option", ["--system", "--template"])
def test_what_is_of_a_conversation_goes_with_one(option, say, tmp_path):
    code, _, error = say("", tmp_path, option, "be")
    assert code and f"{option} is about the conversation of --chat" in error


def test_a_template_may_be_named_where_the_tokenizer_has_none(chatting, say, tmp_path):
    folder = chatting(special=())
    options = ("--chat", "--tokens", 6, "--temperature", 0, "--prompt", "stage")
    code, _, error = say("", folder, *options)
    assert code and "--template" in error
    template = tmp_path / "plain.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    model = Model(folder, "cpu")
    wanted = model.write(model.encode("user: stage\nassistant:"), 6, Sampling(0.0, 40, 1.0, 0))
    _, said, _ = say("", folder, *options, "--template", template)
    assert said == "".join(wanted) + "\n"


def test_a_long_prompt_is_cut_and_that_is_said(chatting, say):
    prompt = "stage " * 200
    _, said, note = say("", chatting(), "--prompt", prompt, "--tokens", 2)
    assert said.startswith(prompt) and "the model sees the last 128" in note


@pytest.mark.slow
def test_ctrl_c_closes_a_server_in_good_order(chatting, tmp_path):
    program = Program(["serve", str(chatting()), "--port", "0"], tmp_path, tmp_path)
    program.wait_for(r"test-0 is served at http://127\.0\.0\.1:(\d+)/v1; Ctrl-C ends it")
    (port,) = re.findall(r"127\.0\.0\.1:(\d+)", program.text())
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    body = json.dumps({"prompt": "stage", "max_tokens": 3})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert connection.getresponse().status == 200
    program.stop(code=0)
    assert "the server is closed; it answered 1 requests" in program.text()
