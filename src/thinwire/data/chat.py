"""Conversations to token ids, and which of them are learned: by a tokenizer and its chat template.

    chat = Chat.open(checkpoint.folder)            # or any folder with a tokenizer.json
    ids = chat.prompt_ids([{"role": "user", "content": "Hello"}])   # the model answers behind them
    ids[-1] in chat.end_ids                        # an answer ends with one of these

Records hold conversations in the forms of `FORMS`, which docs/data.md describes. All become one:
messages with a role and a content. A chat template, Jinja2 text that comes from others, turns them
into one text (data/rendering.py).

The messages come from others too: what the template writes may hold special tokens, what a message
holds never becomes one. A guard, a character that no text needs, is put into such spellings, and
what was rendered is split there before it is encoded.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from thinwire.data.rendering import BEGIN, END, RENDERER
from thinwire.data.sources import read_json, reading
from thinwire.data.tokenizer import PIECE_CHARACTERS, Tokenizer, pieces_of
from thinwire.errors import DataError

CONFIG = "tokenizer_config.json"
JINJA = "chat_template.jinja"
# Such as those two, one of the characters that Unicode reserves for use inside of programs.
GUARD = "\ufdd0"
_REPLACED = str.maketrans(dict.fromkeys((GUARD, BEGIN, END), "\ufffd"))
_UNMARKED = str.maketrans("", "", BEGIN + END)

ASSISTANT = "assistant"
ROLES = {
    **{name: name for name in ("system", "developer", "user", ASSISTANT, "tool", "function")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), ASSISTANT),
    **dict.fromkeys(("function_response", "observation"), "tool"),
    "ipython": "ipython",
}
FORMS = {
    "messages": ("messages", ()),
    "conversations": ("ShareGPT", ()),
    "prompt": ("prompt and completion", ("completion", "response")),
    "instruction": ("Alpaca", ("output", "response")),
}
"""By the key that each form is recognised by: its name, and the keys of which it has one for the
answer. The first form that a record has decides."""

Messages = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]  # where in a text parts begin and end
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


class NotAConversation(ValueError):
    """A record that has none of the forms, or not as it should; the text says why."""


@dataclass(frozen=True)
class Conversation:
    """Messages in turn, and the tools that the assistant may call."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    form: str = "messages"

    def json(self) -> str:
        """One line of text: the same for the same conversation, in whatever form it was kept."""
        content = {"messages": self.messages, **({"tools": self.tools} if self.tools else {})}
        # A date or the like, which a table may hold beside the texts, is kept as its text.
        return json.dumps(content, ensure_ascii=False, sort_keys=True, default=str)

    @classmethod
    def from_json(cls, text: str) -> "Conversation":
        """The inverse of `json`; the form is not kept."""
        content = json.loads(text)
        return cls(content["messages"], content.get("tools"))


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer to learn: not an empty one, nor one of weight 0."""
    says = bool(message["content"].strip()) or bool(message.get("tool_calls"))
    return message["role"] == ASSISTANT and says and message.get("weight", 1) != 0


def form_of(record: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The key that a record is recognised by, and its answer where that stands apart; or None."""
    for key, (_, answers) in FORMS.items():
        said = next((record[k] for k in answers if record.get(k) is not None), None)
        if record.get(key) is not None and (not answers or said is not None):
            return key, said
    return None


def conversation_of(record: Any) -> Conversation:
    """A record as a conversation; NotAConversation says what keeps it from being one."""
    if not isinstance(record, Mapping):
        raise NotAConversation("it is not an object")
    if (form := form_of(record)) is None:
        names = ", ".join(f'"{name}"' for name in list(record)[:12])
        raise NotAConversation(
            f'it has the keys {names or "of nothing"}; a conversation has "messages", '
            '"conversations", "prompt" and "completion", or "instruction" and "output"'
        )
    key, said = form
    asked = record[key]
    if key == "instruction":
        given = record.get("input") or record.get("context") or ""
        if not all(isinstance(text, str) for text in (asked, given, said)):
            raise NotAConversation('"instruction", "input" and "output" must be text')
        asked = f"{asked}\n\n{given}" if given.strip() else asked
    if said is None:
        messages = checked(asked)
    else:
        before, after = (
            checked([{"role": role, "content": text}] if isinstance(text, str) else text)
            for role, text in (("user", asked), (ASSISTANT, said))
        )
        # Answers that belong to the prompt are there to be read, not to be learned.
        messages = [m | {"weight": 0} if m["role"] == ASSISTANT else m for m in before] + after
    system = record.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    tools = record.get("tools")
    if isinstance(tools, str):  # some keep them as JSON within JSON
        with contextlib.suppress(ValueError, RecursionError):
            tools = json.loads(tools.strip() or "null")
    tools = [tools] if tools and isinstance(tools, Mapping) else tools or None
    if not isinstance(tools, list | None):
        raise NotAConversation('"tools" must be a list, or valid JSON of one')
    return Conversation(messages, tools, FORMS[key][0])


def checked(messages: Any) -> list[dict[str, Any]]:
    """Messages with known roles and contents of text; NotAConversation names what is wrong."""
    if not isinstance(messages, list | tuple) or not messages:
        raise NotAConversation("it has no list of messages")
    return [_message(message, f"message {number}") for number, message in enumerate(messages, 1)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise NotAConversation(f"{where} is not an object")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise NotAConversation(f"{where} has the role {role!r}; known: {', '.join(ROLES)}")
    content = message.get("content", message.get("value"))
    if content is None and ROLES[role.lower()] == "user":
        raise NotAConversation(f"{where} has no content")
    parts = content if isinstance(content, list) else ["" if content is None else content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise NotAConversation(f"{where} holds something else than text, such as an image")
    content = "".join(map(str, texts))
    try:
        content.encode()
    except UnicodeEncodeError as error:  # an escape such as "\ud800" alone is no character
        why = f"the content of {where} is not valid Unicode ({error.reason})"
        raise NotAConversation(why) from None
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise NotAConversation(f"the tool_calls of {where} are not a list of objects")
    # A table of Arrow has every key in every row, and None where there was none.
    left_out = ("role", "from", "content", "value")
    rest = {k: v for k, v in message.items() if v is not None and k not in left_out}
    return {"role": ROLES[role.lower()], "content": content, **rest}


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
        path, own = tokenizer.with_name(CONFIG), tokenizer.with_name(JINJA)
        config = read_json(path, "repair or remove it") if path.is_file() else {}
        if own.is_file():
            return cls(_read_text(own), str(own), config, is_own=True)
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {entry.get("name"): entry for entry in source if isinstance(entry, dict)}
            source = named.get("default", {}).get("template")
        if source is not None and not isinstance(source, str):
            raise DataError(f"{path}: chat_template is no text: correct it, or set data.template")
        return None if source is None else cls(source, str(path), config, is_own=True)

    @classmethod
    def chosen(cls, name: str, tokenizer: Path | None) -> "ChatTemplate":
        """What data.template names; "": the tokenizer's own, and ChatML where it has none."""
        own = cls.beside(tokenizer) if tokenizer is not None else None
        if name == "tokenizer" and own is None:
            raise DataError(
                'data.template = "tokenizer", but no chat template is beside the tokenizer '
                f"({CONFIG} or {JINJA}): put it there, or set data.template"
            )
        if name in ("", "tokenizer"):
            return own or cls(CHATML, "chatml")
        source = CHATML if name == "chatml" else _read_text(Path(name).expanduser())
        return cls(source, name, own.config if own is not None else {})

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

    def render(self, messages: Messages, tools: Any = None, prompts: bool = False) -> str:
        """The text of messages; with `prompts` the beginning of an answer follows."""
        values: dict[str, Any] = {"messages": messages, "tools": tools or None, "documents": None}
        values |= {"add_generation_prompt": prompts, **self.tokens}
        answer = RENDERER.render(self.source, values)
        if "error" in answer:
            start = next((str(m.get("content", "")) for m in messages), "")[:60]
            raise DataError(
                f"the chat template ({self.name}) cannot render a conversation that begins with "
                f"{start!r}: {answer['error']}; correct it, or choose another data.template"
            )
        return answer["text"]

    @cached_property
    def tokens(self) -> dict[str, str]:
        """Such as bos_token, which a config has as text or as an object with it."""
        named = {key: value for key, value in self.config.items() if key.endswith("_token")}
        texts = ((k, v.get("content") if isinstance(v, dict) else v) for k, v in named.items())
        return {key: text for key, text in texts if isinstance(text, str)}


class Specials:
    """Finds special tokens where they are spelled out in a text."""

    def __init__(self, tokens: Sequence[str]) -> None:
        long = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
        self._short = [token for token in tokens if len(token) == 1]
        starts = {token[:length] for token in long for length in range(1, len(token))}
        self._starts = tuple(start.lower() for start in starts)
        self._longest = max(map(len, long), default=1)
        names = "|".join(map(re.escape, long)) or "(?!)"
        # Some tokenizers do not care for upper and lower case.
        self._spelled = re.compile(names, re.IGNORECASE)
        self.exact = re.compile(f"({names})")
        self.behind_space = re.compile(rf"\s*(?:{names})")

    def guard(self, value: Any) -> Any:
        """A message, or anything in one, with a guard inside of every special token."""
        if isinstance(value, dict):
            return {self.guard(key): self.guard(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.guard(item) for item in value]
        return self._guarded(value) if isinstance(value, str) else value

    def last(self, text: str) -> re.Match[str] | None:
        """Where the last special token of a text stands."""
        return next(reversed([*self.exact.finditer(text)]), None)

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


def _read_text(path: Path) -> str:
    advice = "correct --template, data.template or data.tokenizer"
    with reading(path, (OSError, ValueError), advice):
        return path.read_text(encoding="utf-8")


class Encoded(NamedTuple):
    """A text and its ids; of each, where known, its bytes in the text and whether it is learned."""

    text: str
    ids: np.ndarray
    sizes: np.ndarray | None = None
    learned: np.ndarray | None = None


class Chat:
    """A tokenizer with a chat template that its vocabulary fits."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        missing = [token for token in CHATML_TOKENS if tokenizer.id_of(token) is None]
        if template.source == CHATML and missing:
            raise DataError(
                f"the chat template ChatML needs {' and '.join(CHATML_TOKENS)} as special tokens, "
                f"and the tokenizer has no {missing[0]}: put its own chat template beside it "
                "(tokenizer_config.json), or name one with data.template or --template"
            )
        self.tokenizer = tokenizer
        self.template = template
        self._specials = Specials(tokenizer.special_tokens)

    @classmethod
    def open(cls, folder: Path, template: str = "") -> "Chat":
        """What a folder with a tokenizer is asked with; `template` is as data.template."""
        path = folder / "tokenizer.json"
        return cls(Tokenizer.load(path), ChatTemplate.chosen(template, path))

    def prompt_ids(self, messages: Messages) -> list[int]:
        """The ids of a conversation up to where the assistant's next answer begins."""
        try:
            guarded = self._specials.guard(checked(messages))
        except NotAConversation as error:
            raise DataError(f"these messages are no conversation: {error}") from None
        text = self.template.render(guarded, prompts=True).translate(_UNMARKED)
        encoded = self.tokenizer.encode_measured(self._parts(text), rendered=True)
        return [int(i) for part in encoded for i in part.ids]

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids that end an answer: by the template, by its config, or between texts."""
        said = Conversation([{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "a"}])
        names = {self.template.tokens.get("eos_token")}  # what the config says
        with contextlib.suppress(DataError):  # it shows no answers, as one that opens a thought
            text, spans = self._rendered(said)
            for start, stop in spans:
                last = self._specials.last(text[start:stop])
                names.add(last[0] if last else None)
        ids = {self.tokenizer.id_of(name) for name in names if name is not None}
        return frozenset(i for i in (*ids, self.tokenizer.end_of_text) if i is not None)

    def encode_all(self, conversations: list[Conversation], learn_all: bool) -> list[Encoded]:
        """The ids of each conversation, and unless `learn_all` which of them are of answers."""
        rendered = [self._rendered(each, not learn_all) for each in conversations]
        parts = [self._parts(text) for text, _ in rendered]
        every = [part for own in parts for part in own]
        flat = iter(self.tokenizer.encode_measured(every, rendered=True))
        found = []
        for (text, spans), own in zip(rendered, parts, strict=True):
            is_answer = np.zeros(len(text) + 1, np.uint8)  # the last is for what ends before it
            for start, stop in spans:
                is_answer[start:stop] = 1
            is_answer = np.delete(is_answer, [guard.start() for guard in re.finditer(GUARD, text)])
            encoded = [next(flat) for _ in own]
            ids, sizes = (np.concatenate([part[n] for part in encoded]) for n in range(2))
            sizes[np.isin(ids, self.tokenizer.special_ids)] = 0
            # A token belongs to where its last character stands.
            before = np.cumsum([0, *map(len, own)])[:-1]
            lasts = [at + part.ends - 1 for at, part in zip(before, encoded, strict=True)]
            learned = None if learn_all else is_answer[np.concatenate(lasts)]
            found.append(Encoded(text.replace(GUARD, ""), ids, sizes, learned))
        return found

    def _parts(self, text: str) -> list[str]:
        """Parts of a rendered text to encode one by one: split at guards, and where it is long."""
        found: list[str] = []
        for part in text.split(GUARD):
            is_long = len(part) > PIECE_CHARACTERS
            for own in self._specials.exact.split(part) if is_long else [part]:
                found += [piece for piece, _ in pieces_of(own)]
        return found

    def _rendered(self, conversation: Conversation, marked: bool = True) -> tuple[str, Spans]:
        """The text with its guards, and where in it the answers are that shall be learned."""
        messages = self._specials.guard(conversation.messages)
        tools = self._specials.guard(conversation.tools)
        text = self.template.render(messages, tools)
        if not marked:
            return text.translate(_UNMARKED), []
        if re.search(r"\{%-?\s*generation\b", self.template.source):
            return self._marked(text, messages)
        spans = []
        for number, message in enumerate(conversation.messages):
            if not is_learned(message):
                continue
            # From behind the prompt of the answer to the token that ends it.
            before = self.template.render(messages[:number], tools, prompts=True)
            if not text.startswith(before):
                raise self._unclear("what it writes ahead of an answer changes with what follows")
            stop = self._end_of_content(text, messages, tools, number)
            if stop is None or stop <= len(before):
                through = self.template.render(messages[: number + 1], tools)
                stop = self._end_of_message(text, through, len(before))
            spans.append((len(before), stop))
        return text, spans

    def _marked(self, text: str, messages: Messages) -> tuple[str, Spans]:
        """Answers as the template marks them."""
        answers = [message for message in messages if message["role"] == ASSISTANT]
        marks = [*re.finditer(f"{BEGIN}[^{BEGIN}{END}]*{END}", text)]
        if not len(marks) == text.count(BEGIN) == len(answers):
            raise DataError(
                f"the chat template ({self.template.name}) marks {text.count(BEGIN)} answers of "
                f"{len(answers)} with {{% generation %}}: correct it, or set another data.template"
            )
        spans = [
            (mark.start() - 2 * number, mark.end() - 2 * number - 2)  # where no marks are
            for number, (mark, message) in enumerate(zip(marks, answers, strict=True))
            if is_learned(message)
        ]
        return text.translate(_UNMARKED), spans

    def _end_of_content(self, text: str, messages: Any, tools: Any, number: int) -> int | None:
        """Behind the special token that follows the content of a message; None if none does."""
        message = messages[number]
        if message.get("tool_calls"):
            return None
        # A mark at its end shows where it is; some templates write the last answer in another way.
        marked = {**message, "content": message["content"].rstrip() + END}
        shown = self.template.render([*messages[:number], marked, *messages[number + 1 :]], tools)
        at = shown.find(END)
        if at < 0 or shown[:at] != text[:at]:
            return None
        following = self._specials.behind_space.match(text, at)
        return following.end() if following else None

    def _end_of_message(self, text: str, through: str, start: int) -> int:
        """Where an answer ends by what the conversation through it has in common with all of it."""
        common = os.path.commonprefix([text, through])  # noqa: RUF071 -- of texts, not of paths
        if (last := self._specials.last(common[start:])) is not None:
            return start + last.end()
        if common != through or len(through) <= start:
            raise self._unclear("it writes an answer otherwise when more follows")
        return len(through)

    def _unclear(self, why: str) -> DataError:
        return DataError(
            f"the chat template ({self.template.name}) does not show which tokens are the "
            f"assistant's: {why}. Put {{% generation %}} and {{% endgeneration %}} around them "
            'in a copy of it for data.template, or set that to "chatml", or data.learn to "all"'
        )
