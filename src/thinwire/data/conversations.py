"""Conversations in the forms that people keep them in, recognised by the keys of a record.

| form | keys |
|---|---|
| messages | `messages`: a list of `role` and `content` |
| sharegpt | `conversations`: a list of `from` and `value` |
| prompt | `prompt` and `completion` (or `response`), each a text or a list of messages |
| alpaca | `instruction`, perhaps `input`, and `output` |

All become one: messages with a role and a content. A `system` text beside any of them comes first.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function")},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function_response": "tool",
    "observation": "tool",
    "ipython": "ipython",
}
ASSISTANT = "assistant"
ANSWER_KEYS = {
    "messages": (),
    "conversations": (),
    "prompt": ("completion", "response"),
    "instruction": ("output", "response"),
}
"""The key by which each form is recognised, and those of which it has one for the answer; the first
form that a record has decides."""


class NotAConversation(ValueError):
    """A record that has none of the forms, or not as it should; the text says why."""


@dataclass(frozen=True)
class Conversation:
    """Messages in turn, and the tools that the assistant may call."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    form: str = "messages"

    @property
    def has_answer(self) -> bool:
        """Whether there is anything to learn in it."""
        return any(is_learned(message) for message in self.messages)

    @property
    def texts(self) -> list[str]:
        """What was said."""
        return [message["content"] for message in self.messages]

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


def form_of(record: Mapping[str, Any]) -> str | None:
    """The key that a record is recognised by, or None."""
    for key, answers in ANSWER_KEYS.items():
        if record.get(key) is not None and (not answers or _answer(record, key) is not None):
            return key
    return None


def conversation_of(record: Mapping[str, Any]) -> Conversation:
    """A record as a conversation; NotAConversation says what keeps it from being one."""
    key = form_of(record)
    if key is None:
        names = ", ".join(f'"{name}"' for name in list(record)[:12])
        raise NotAConversation(
            f'it has the keys {names or "of nothing"}; a conversation has "messages", '
            '"conversations", "prompt" and "completion", or "instruction" and "output"'
        )
    form, read = _READERS[key]
    messages = read(record)
    system = record.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return Conversation(messages, _tools(record.get("tools")), form)


def checked(messages: Any) -> list[dict[str, Any]]:
    """Messages with known roles and contents of text; NotAConversation names what is wrong."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not len(messages):
        raise NotAConversation("it has no list of messages")
    return [_message(message, number) for number, message in enumerate(messages, 1)]


def _message(message: Any, number: int) -> dict[str, Any]:
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise NotAConversation(f"{where} is not an object")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or role.lower() not in ROLES:
        known = ", ".join(ROLES)
        raise NotAConversation(f"{where} has the role {role!r}; known: {known}")
    content = _content(message.get("content", message.get("value")), where)
    # A table of Arrow has every key in every row, and None where there was none.
    left_out = ("role", "from", "content", "value")
    rest = {k: v for k, v in message.items() if v is not None and k not in left_out}
    return {"role": ROLES[role.lower()], "content": content, **rest}


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise NotAConversation(f"{where} holds something else than text, such as an image")
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise NotAConversation(f"the content of {where} is not text")
    try:
        content.encode()
    except UnicodeEncodeError as error:  # an escape such as "\ud800" alone is no character
        raise NotAConversation(
            f"the content of {where} is not valid Unicode ({error.reason})"
        ) from None
    return content


def _from_list(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return checked(record[form_of(record) or ""])


def _from_prompt(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    asked, said = record["prompt"], _answer(record, "prompt")
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if isinstance(said, str):
        said = [{"role": ASSISTANT, "content": said}]
    # Answers that belong to the prompt are there to be read, not to be learned.
    before = [
        {**message, "weight": 0} if message["role"] == ASSISTANT else message
        for message in checked(asked)
    ]
    return before + checked(said)


def _from_instruction(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    answer = _answer(record, "instruction")
    asked, given = record["instruction"], record.get("input") or record.get("context") or ""
    if not all(isinstance(text, str) for text in (asked, given, answer)):
        raise NotAConversation('"instruction", "input" and "output" must be text')
    question = f"{asked}\n\n{given}" if given.strip() else asked
    return checked([{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}])


def _answer(record: Mapping[str, Any], key: str) -> Any:
    return next((record[k] for k in ANSWER_KEYS[key] if record.get(k) is not None), None)


def _tools(tools: Any) -> list[Any] | None:
    """Descriptions of tools, which some keep as JSON within JSON."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise NotAConversation('"tools" is text, but not valid JSON') from None
    return list(tools) if isinstance(tools, Sequence) and len(tools) else None


_READERS: dict[str, tuple[str, Callable[[Mapping[str, Any]], list[dict[str, Any]]]]] = {
    "messages": ("messages", _from_list),
    "conversations": ("ShareGPT", _from_list),
    "prompt": ("prompt and completion", _from_prompt),
    "instruction": ("Alpaca", _from_instruction),
}
