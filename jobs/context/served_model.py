"""The model that a process serves: its names and identity, and what it tells of prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from secrets import token_hex
from typing import Any

from jobs.context.values import some_text
from jobs.errors import InvalidJob, ModelNotServed

MAX_MODEL_CHARS = 4096


@dataclass(frozen=True)
class PinnedModel:
    """A model whose answers a run holds.

    fingerprint: a text that differs when the weights, the tokenizer, the chat template or the dtype do. max_model_len:
    the most tokens of prompt and answer together; 0 if that is not known. clock: the date or time that its chat
    template wrote when the run was planned; "" if it writes none.
    """

    name: str
    fingerprint: str
    dtype: str
    max_model_len: int = field(default=0, kw_only=True)
    clock: str = field(default="", kw_only=True)

    def __str__(self) -> str:
        length = f", up to {self.max_model_len} tokens" if self.max_model_len else ""
        return f"{self.name} ({self.dtype}, {self.fingerprint[:8]}{length})"

    @property
    def pin(self) -> str:
        """Name what a worker must serve to answer the run's rows. Other workers leave its jobs on the queue."""
        return f"{self.fingerprint}/{self.max_model_len}" if self.max_model_len else self.fingerprint

    @property
    def identity(self) -> str:
        """Name the parts of the model that decide an answer, unless its length limit cut it."""
        return f"{self.fingerprint} {self.clock}" if self.clock else self.fingerprint


@dataclass(frozen=True)
class ServedModel(PinnedModel):
    """One model as one process serves it.

    aliases: what else it may be called. embedding_size: 0 of a model that gives none. embedding_prompts: names of those
    that may stand before a text. classes: labels of its sequence-classification head, none of a model without.
    control_tokens: texts of tokens that open or end turns; a value in a prompt must not become one. clock_formats: the
    formats in which its chat template writes the time; None if they cannot be known beforehand.
    """

    attention_backend: str = ""
    aliases: tuple[str, ...] = ()
    embedding_size: int = 0
    embedding_prompts: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    control_tokens: tuple[str, ...] = ()  # empty until an engine fills them in, as below
    reads_pictures: bool = True  # as long as no engine has told
    generates: bool = True
    clock_formats: tuple[str, ...] | None = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.fingerprint, self.name, *self.aliases, self.pin)))

    def pinned(self, now: float) -> PinnedModel:
        """Return the model as a run that is planned at this Unix time pins it."""
        clock = clock_text(self.clock_formats, now)
        length = self.max_model_len
        return PinnedModel(self.name, self.fingerprint, self.dtype, max_model_len=length, clock=clock)

    def check_asked_for(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ModelNotServed(name, self.name)

    def check_ranks(self) -> None:
        """Raise InvalidJob for a head of several classes, none of which says how well a document answers."""
        if len(self.classes) > 1:
            raise InvalidJob(
                f"the worker serves {self.name!r}, whose head has {len(self.classes)} classes, not a score"
            )


def clock_text(formats: Sequence[str] | None, now: float) -> str:
    """Return what a chat template writes of a Unix time. formats: of ServedModel."""
    if formats is None:
        return token_hex(8)
    return "\n".join(map(datetime.fromtimestamp(now).strftime, formats))


_UNNAMED = "?"


def joined_formats(formats: Sequence[str] | None) -> str:
    return _UNNAMED if formats is None else "\n".join(formats)


def split_formats(text: str) -> tuple[str, ...] | None:
    """Return the formats from the text that `joined_formats` made."""
    if text == _UNNAMED:
        return None
    return tuple(text.split("\n")) if text else ()


def parse_model(model: object) -> str | None:
    """Return the model that a job's argument asks for. Raises InvalidJob for what can be no name."""
    return None if model is None else some_text("model", model, MAX_MODEL_CHARS)


@dataclass(frozen=True)
class PromptMeter:
    """What the engine of a process makes of prompts.

    token_ids: those of a prompt, or of a chat's messages with its options (as in tasks.Request), in any thread; raises
    InvalidJob with the reason for which the engine would refuse it. block_size: tokens that the prefix cache shares at
    once.
    """

    token_ids: Callable[[Any, list[dict[str, Any]] | None, Mapping[str, Any]], Sequence[int]]
    max_num_seqs: int
    block_size: int
