"""Describes the model that a process serves: its names, its identity, and how it reads prompts."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from secrets import token_hex
from typing import Any

from jobs.context.adapters import shown_adapter
from jobs.errors import InvalidJob, ModelNotServed


@dataclass(frozen=True)
class PinnedModel:
    """The model that answers a run's rows, as it was when the run was planned.

    fingerprint: a text that changes with the weights, the tokenizer, the chat template or the dtype.
    max_model_len: the most tokens of prompt and answer together; 0 if that is not known.
    clock: the date or time that the chat template wrote when the run was planned; "" if it writes none.
    adapters: the adapters that the run names, pinned to their files.
    """

    name: str
    fingerprint: str
    dtype: str
    max_model_len: int = field(default=0, kw_only=True)
    clock: str = field(default="", kw_only=True)
    adapters: tuple[str, ...] = field(default=(), kw_only=True)

    def __str__(self) -> str:
        length = f", up to {self.max_model_len} tokens" if self.max_model_len else ""
        text = f"{self.name} ({self.dtype}, {self.fingerprint[:8]}{length})"
        if self.adapters:
            text += f" with adapters {', '.join(map(shown_adapter, self.adapters))}"
        return text

    @cached_property
    def pin(self) -> str:
        """Return a text that names what a worker must serve to answer the run's rows.

        Its first line names the model. Each further line names an adapter. Workers that serve anything else leave the
        run's jobs on the queue.
        """
        model = self.fingerprint
        if self.max_model_len != 0:
            model = f"{model}/{self.max_model_len}"
        return "\n".join([model, *self.adapters])

    @property
    def identity(self) -> str:
        """Return a text that names what decides every answer: the fingerprint and the clock.

        The length limit is left out, because it changes no answer. Adapters are left out, because the key of an answer
        names the adapter that computed the answer.
        """
        return f"{self.fingerprint} {self.clock}" if self.clock else self.fingerprint


@dataclass(frozen=True)
class ServedModel(PinnedModel):
    """A model as a process serves it.

    aliases: the model's other names. generates: whether it has an LM head.
    embedding_size: how many numbers an embedding has; 0 for a model without embeddings. embedding_prompts: the names of
    the checkpoint's prompts that may stand before a text to embed.
    classes: the labels of the sequence-classification head; empty without such a head.
    control_tokens: the texts of tokens that begin or end turns. A value in a prompt must not become such a token.
    clock_formats: the strftime formats in which the chat template writes the time; None if the template computes them,
    or writes something random.
    """

    attention_backend: str = ""
    aliases: tuple[str, ...] = ()
    embedding_size: int = 0
    embedding_prompts: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    control_tokens: tuple[str, ...] = ()  # empty until an engine is loaded
    reads_pictures: bool = True  # True until an engine is loaded
    generates: bool = True
    clock_formats: tuple[str, ...] | None = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names by which a job may ask for the model."""
        names = [self.fingerprint, self.name, *self.aliases, self.pin]
        return tuple(dict.fromkeys(names))  # each name once, in this order

    def pinned(self, now: float) -> PinnedModel:
        """Return the model as a run pins it. now: when the run is planned, in Unix seconds."""
        return PinnedModel(
            self.name,
            self.fingerprint,
            self.dtype,
            max_model_len=self.max_model_len,
            clock=clock_text(self.clock_formats, now),
        )

    def check_asked_for(self, name: str | None) -> None:
        """Raise ModelNotServed if a job asks for another model. name: None for any model."""
        if name is not None and name not in self.names:
            raise ModelNotServed(name, repr(self.name))

    def check_can_rank(self) -> None:
        """Raise InvalidJob if the model's head has several classes, because then no class is a document's score."""
        if len(self.classes) > 1:
            raise InvalidJob(
                f"the worker serves {self.name!r}, whose head has {len(self.classes)} classes, not a score"
            )


def is_served(pin: str, names: Collection[str]) -> bool:
    """Whether a worker serves the model and all adapters of a pin.

    pin: a `PinnedModel.pin`; each of its lines names the model or an adapter.
    names: the names of the models and adapters that the worker serves.
    """
    return all(line in names for line in pin.split("\n"))


def clock_text(formats: Sequence[str] | None, now: float) -> str:
    """Return what a chat template writes for a time, one line for each format.

    formats: see ServedModel.clock_formats. For None, a random text is returned, so that no two texts are equal.
    now: Unix seconds.
    """
    if formats is None:
        return token_hex(8)
    local_time = datetime.fromtimestamp(now)
    return "\n".join(map(local_time.strftime, formats))


#: Stands for formats that are not known.
_UNKNOWN = "?"


def joined_formats(formats: Sequence[str] | None) -> str:
    """Return ServedModel.clock_formats as one text, which Redis can hold."""
    return _UNKNOWN if formats is None else "\n".join(formats)


def split_formats(text: str) -> tuple[str, ...] | None:
    """Return the formats from the text that `joined_formats` made."""
    if text == _UNKNOWN:
        return None
    return tuple(text.split("\n")) if text else ()


@dataclass(frozen=True)
class PromptMeter:
    """Counts the tokens of prompts as the engine of this process would.

    token_ids: takes a tasks.Request, and returns the token ids of its prompt. It may be called in any thread, and
    raises InvalidJob if the engine would refuse the prompt.
    max_num_seqs: the most sequences that run at once. block_size: the tokens of a block of the prefix cache.
    """

    token_ids: Callable[[Any], Sequence[int]]
    max_num_seqs: int
    block_size: int
