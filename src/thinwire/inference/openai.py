"""Requests and answers in the shapes of OpenAI's interface; every field of a request is checked."""

import json
import secrets
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from thinwire.errors import DataError
from thinwire.inference.choice import Sampling
from thinwire.inference.text import TextModel, Writing

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


@dataclass(frozen=True)
class Asked:
    """A text to write."""

    ids: list[int]
    tokens: int
    sampling: Sampling
    stop: list[str]
    ends: Collection[int]
    is_chat: bool
    streams: bool
    wants_usage: bool  # at the end of a stream


def read_request(body: Any, is_chat: bool, model: TextModel, name: str, most_tokens: int) -> Asked:
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
    ids = _chat_ids(body, model) if is_chat else _prompt_ids(body, model)
    context = model.settings.model.context
    if len(ids) > context:
        text = f"the prompt has {len(ids)} tokens, but this model's context is {context} tokens"
        raise RefusedError(text, 400, "context_length_exceeded", "messages" if is_chat else "")
    usual = min(most_tokens, max(1, context - len(ids)) if is_chat else USUAL_TOKENS)
    asked = _number(body, "max_completion_tokens", None, 1, most_tokens, whole=True)
    options = body.get("stream_options")
    seed = _number(body, "seed", None, -(1 << 63), 1 << 63, whole=True)
    return Asked(
        ids=ids,
        tokens=asked or _number(body, "max_tokens", usual, 1, most_tokens, whole=True),
        sampling=Sampling(
            temperature=_number(body, "temperature", 1.0, 0, 100),
            top_k=_number(body, "top_k", 0, 0, 1 << 31, whole=True),
            top_p=_number(body, "top_p", 1.0, 1e-9, 1),
            seed=secrets.randbits(48) if seed is None else seed,
        ),
        stop=_stops(body.get("stop")),
        ends=model.chat().end_ids if is_chat else (),
        is_chat=is_chat,
        streams=body.get("stream") is True,
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


class Answer:
    """A text in the shapes of OpenAI's answers."""

    def __init__(self, asked: Asked, writing: Writing, name: str):
        self._asked, self._writing = asked, writing
        kind = "chat.completion" if asked.is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind + (".chunk" if asked.is_chat and asked.streams else ""),
            "created": int(time.time()),
            "model": name,
        }

    def whole(self, is_wanted: Callable[[], bool]) -> dict[str, Any] | None:
        """All of it; None if nobody wants it any more."""
        pieces = []
        for piece in self._writing:
            if not is_wanted():
                return None
            pieces.append(piece)
        text = "".join(pieces)
        said = {"message": {"role": "assistant", "content": text}}
        return self._with(said if self._asked.is_chat else {"text": text}, usage=True)

    def events(self, is_wanted: Callable[[], bool]) -> Iterator[str]:
        """Piece by piece, then how it ended."""
        if self._asked.is_chat:
            yield json.dumps(self._with({"delta": {"role": "assistant", "content": ""}}, False))
        for piece in self._writing:
            if not is_wanted():
                return
            if piece:
                said = {"delta": {"content": piece}} if self._asked.is_chat else {"text": piece}
                yield json.dumps(self._with(said, False))
        yield json.dumps(self._with({"delta": {}} if self._asked.is_chat else {"text": ""}))
        if self._asked.wants_usage:
            yield json.dumps({**self._head, "choices": [], "usage": self._usage()})
        yield "[DONE]"

    def _with(self, said: dict[str, Any], ended: bool = True, usage: bool = False) -> Any:
        reason = self._writing.ended_by if ended else None
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        return {**self._head, "choices": [choice], **({"usage": self._usage()} if usage else {})}

    def _usage(self) -> dict[str, int]:
        prompt, written = len(self._asked.ids), self._writing.count
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
        }


def _prompt_ids(body: dict[str, Any], model: TextModel) -> list[int]:
    prompt = body.get("prompt", "")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise RefusedError("prompt must be one text", param="prompt")
    return model.encode(prompt)


def _chat_ids(body: dict[str, Any], model: TextModel) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError("messages must be a list with at least one message", param="messages")
    try:
        return model.chat().prompt_ids([_with_plain_text(message) for message in messages])
    except DataError as error:
        raise RefusedError(str(error), param="messages") from None


def _with_plain_text(message: Any) -> dict[str, Any]:
    """A message whose content is text, also where it came in parts."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str | list):
        raise RefusedError("a message must be an object with role and content", param="messages")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise RefusedError("a message may hold parts of text only", param="messages")
        return {**message, "content": "".join(map(str, texts))}
    return message


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
