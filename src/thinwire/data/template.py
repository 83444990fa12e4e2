"""A chat template: Jinja2 text that turns messages into one text, as tokenizers are published with.

It comes from others, so it runs in Jinja's sandbox, where it can compute text and nothing else, and
in a process that has little time and memory for it (data/rendering.py). The messages come from
others too: a special token that is spelled out in one must not become one. A guard, a character
that no text needs, is put into such spellings, and whoever encodes what was rendered splits it
there (data/chat.py).
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.data.files import reading
from thinwire.data.rendering import BEGIN, END, RENDERER, InvalidTemplate, RenderError
from thinwire.errors import DataError

CONFIG = "tokenizer_config.json"
JINJA = "chat_template.jinja"
# Such as those two, one of the characters that Unicode reserves for use inside of programs.
GUARD = "\ufdd0"
MARKS = GUARD, BEGIN, END
_REPLACED = str.maketrans(dict.fromkeys(MARKS, "\ufffd"))

TEMPLATES = ("", "tokenizer", "chatml")  # what data.template says that is no path
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n<|tools|>' + tools | tojson + '<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<|tool_call|>' + (call['function'] or call) | tojson }}{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class ChatTemplate:
    """The text of a template, and what else a tokenizer_config.json says."""

    source: str
    name: str  # for the user: where it is from
    config: Mapping[str, Any] = field(default_factory=dict)
    is_own: bool = False  # whether it was published with the tokenizer

    @classmethod
    def beside(cls, tokenizer: Path) -> "ChatTemplate | None":
        """The template that was published with a tokenizer.json, if there is one."""
        config = _read_config(tokenizer.with_name(CONFIG))
        own = tokenizer.with_name(JINJA)
        if own.is_file():
            return cls(_read(own), str(own), config, is_own=True)
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {entry.get("name"): entry for entry in source if isinstance(entry, dict)}
            source = named.get("default", {}).get("template")
        if source is None:
            return None
        if not isinstance(source, str):
            raise DataError(
                f"{tokenizer.with_name(CONFIG)} has a chat_template that is not text: correct it, "
                "or set data.template"
            )
        return cls(source, str(tokenizer.with_name(CONFIG)), config, is_own=True)

    @classmethod
    def chosen(cls, name: str, tokenizer: Path | None) -> "ChatTemplate":
        """What data.template names: "chatml", the path of a Jinja file, or "" for the tokenizer's
        own, and ChatML where it has none.
        """
        own = cls.beside(tokenizer) if tokenizer is not None else None
        if name == "":
            return own or cls(CHATML, "chatml")
        if name == "tokenizer":
            if own is None:
                raise DataError(
                    'data.template = "tokenizer", but no chat template is beside the tokenizer '
                    f"({CONFIG} or {JINJA}): put it there, or set data.template"
                )
            return own
        config = own.config if own is not None else {}
        if name == "chatml":
            return cls(CHATML, "chatml", config)
        return cls(_read(Path(name).expanduser()), name, config)

    @property
    def digest(self) -> str:
        """A hash of all that decides what is rendered."""
        return hashlib.blake2b(self.json().encode(), digest_size=16).hexdigest()

    def json(self) -> str:
        """The text of a tokenizer_config.json with this template."""
        return json.dumps({**self.config, "chat_template": self.source}, indent=2, sort_keys=True)

    @property
    def special_names(self) -> list[str]:
        """Special tokens that are spelled out in the template, such as <|im_end|>."""
        return list(dict.fromkeys(re.findall(r"<\|[\w.-]+\|>", self.source)))

    @property
    def marks_answers(self) -> bool:
        """Whether the template itself says what an assistant writes ({% generation %})."""
        return re.search(r"\{%-?\s*generation\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        prompts: bool = False,
    ) -> str:
        """The text of messages; with `prompts` the beginning of an answer follows."""
        values = {
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": prompts,
            **self._tokens,
        }
        try:
            return RENDERER.render(self.source, values)
        except InvalidTemplate as error:
            raise DataError(f"{self.name} is not a valid chat template: {error}") from None
        except RenderError as error:
            start = next((str(m.get("content", "")) for m in messages), "")[:60]
            raise DataError(
                f"the chat template ({self.name}) cannot render a conversation that begins with "
                f"{start!r}: {error}; correct the conversation, or choose another data.template"
            ) from None

    @functools.cached_property
    def _tokens(self) -> dict[str, str]:
        """Such as bos_token, which a config has as text or as an object with it."""
        found = {}
        for key, value in self.config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
        return found

    @property
    def end_token(self) -> str | None:
        """What the config names as the end of an answer."""
        return self._tokens.get("eos_token")


class Specials:
    """Finds special tokens where they are spelled out in a text."""

    def __init__(self, tokens: Sequence[str]) -> None:
        long = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
        self._short = [token for token in tokens if len(token) == 1]
        starts = {token[:length] for token in long for length in range(1, len(token))}
        self._starts = tuple(start.lower() for start in starts)
        self._longest = max(map(len, long), default=1)
        # Some tokenizers do not care for upper and lower case.
        self._spelled = re.compile("|".join(map(re.escape, long)) or r"(?!)", re.IGNORECASE)
        names = "|".join(map(re.escape, long)) or "(?!)"
        self._exact, self._next = re.compile(f"({names})"), re.compile(rf"\s*(?:{names})")

    def guard(self, value: Any) -> Any:
        """A message, or anything in one, with a guard inside of every special token."""
        if isinstance(value, dict):
            return {self.guard(key): self.guard(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.guard(item) for item in value]
        return self._guarded(value) if isinstance(value, str) else value

    def split(self, text: str) -> list[str]:
        """What is between special tokens, and these."""
        return [part for part in self._exact.split(text) if part]

    def last(self, text: str) -> tuple[str, int] | None:
        """The last special token of a text, and where it ends."""
        found = list(self._exact.finditer(text))
        return (found[-1][0], found[-1].end()) if found else None

    def end_of_next(self, text: str, start: int) -> int | None:
        """Where the special token ends that begins here, or behind white space from here."""
        found = self._next.match(text, start)
        return found.end() if found else None

    def _guarded(self, text: str) -> str:
        if short := [token for token in self._short if token in text]:
            raise DataError(
                f"the tokenizer has {short[0]!r} as a special token, which a message holds as "
                "plain text: one character cannot be both. Choose another data.tokenizer"
            )
        text = text.translate(_REPLACED)
        while self._spelled.search(text):
            text = self._spelled.sub(lambda found: found[0][0] + GUARD + found[0][1:], text)
        # The text that follows must not complete a special token either.
        body = text.rstrip()
        if body[-self._longest :].lower().endswith(self._starts):
            return body + GUARD + text[len(body) :]
        return text


def _read(path: Path) -> str:
    with reading(path, (OSError, ValueError), "correct data.template or data.tokenizer"):
        return path.read_text(encoding="utf-8")


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}): repair or remove it") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} holds no object: repair or remove it")
    return config
