"""Harmony, the form of gpt-oss's answers: messages in channels, for reasoning, tool calls and the answer."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

#: The text that opens reasoning, and the one that ends it and opens the answer.
REASONING_START = f"{CHANNEL}analysis{MESSAGE}"
ANSWER_START = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"

_ENDS = re.compile("|".join(map(re.escape, (START, END, CALL, RETURN))))
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True)
class HarmonyMessage:
    """One message of an answer.

    recipient: whom a call is for, such as "functions.add"; None if it is no call. is_closed: a mark ends it.
    """

    channel: str | None
    recipient: str | None
    content: str
    is_closed: bool = True

    @property
    def is_answer(self) -> bool:
        return self.channel != "analysis" and self.recipient is None

    @property
    def is_reasoning(self) -> bool:
        """Whether it is reasoning: text of the analysis channel, or a call there of the model's own tools."""
        return self.channel == "analysis" and not (self.recipient or "").startswith("functions.")


def _message(header: str, content: str, *, is_closed: bool) -> HarmonyMessage:
    channel = _CHANNEL.search(header)
    recipient = _RECIPIENT.search(header)
    return HarmonyMessage(channel and channel[1], recipient and recipient[1], content, is_closed)


def read_messages(text: str) -> Iterator[HarmonyMessage]:
    """Yield the messages of a text with its marks. A text without marks is an answer. A header alone yields none."""
    while text:
        header, mark, behind = text.partition(MESSAGE)
        if not mark:
            plain = _ENDS.sub("", header)
            if plain and CHANNEL not in header and START not in header:
                yield HarmonyMessage(None, None, plain)
            return
        end = _ENDS.search(behind)
        yield _message(header, behind[: end.start()] if end else behind, is_closed=end is not None)
        text = behind[end.end() :] if end else ""


def split_channels(text: str) -> tuple[str | None, str]:
    """Split an answer that has its marks into reasoning (or None) and content. Tool calls follow the content."""
    messages = list(read_messages(text))
    reasoning = [message.content for message in messages if message.is_reasoning]
    answers = [message.content for message in messages if message.is_answer]
    calls = []
    for message in messages:
        if message.is_reasoning or message.is_answer:
            continue
        end = CALL if message.is_closed else ""
        calls.append(f"{CHANNEL}commentary to={message.recipient}{MESSAGE}{message.content}{end}")
    return "\n".join(reasoning) if reasoning else None, "\n".join(answers) + "".join(calls)


def open_header(prompt: str) -> str:
    """Return the header of the message that a prompt leaves open for its answer; "" if all are closed."""
    _, mark, message = prompt.rpartition(START)
    if not mark or _ENDS.search(message):
        return ""
    header, begun, _ = message.partition(MESSAGE)
    return header + begun


class AnswerChannels:
    """Tells the answer from reasoning and calls, token by token.

    marks: the texts of marks by token id. header: the prompt's open header, as `open_header` returns it.
    """

    def __init__(self, marks: Mapping[int, str], header: str) -> None:
        self._marks = marks
        self._header = header
        self._is_plain = True  # no mark has come yet
        self._is_answer: bool | None = None  # None within a header
        self._take(MESSAGE if header.endswith(MESSAGE) else "")

    def answer_part(self, token_id: int, text: str) -> str:
        """Return the part of this token's text that belongs to the answer."""
        mark = self._marks.get(token_id)
        if mark is not None:
            self._is_plain = False
            self._take(mark)
            return ""
        if self._is_answer is None and self._is_plain:
            # No mark came yet: an answer without channels.
            return "" if text.strip().startswith("to=") else text
        if self._is_answer is None:
            self._header += text
        return text if self._is_answer else ""

    def _take(self, mark: str) -> None:
        if mark == MESSAGE:
            self._is_answer = _message(self._header, "", is_closed=False).is_answer
        elif mark in (START, END, CALL, RETURN):
            self._is_answer = None
            self._header = ""
        else:
            self._header += mark
