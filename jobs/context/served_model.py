"""The model that a process serves: its names and identity, and what it tells of prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.context.values import some_text
from jobs.errors import InvalidJob, ModelNotServed

MAX_MODEL_CHARS = 4096


@dataclass(frozen=True)
class PinnedModel:
    """A model whose answers a run holds.

    fingerprint: a text that differs when the weights, the tokenizer, the chat template or the dtype do.
    """

    name: str
    fingerprint: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}, {self.fingerprint[:8]})"


@dataclass(frozen=True)
class ServedModel(PinnedModel):
    """One model as one process serves it.

    aliases: what else it may be called. embedding_size: 0 of a model that gives none. embedding_prompts: names of those
    that may stand before a text. classes: labels of its sequence-classification head, none of a model without.
    control_tokens: texts of tokens that open or end turns; a value in a prompt must not become one.
    """

    attention_backend: str = ""
    aliases: tuple[str, ...] = ()
    embedding_size: int = 0
    embedding_prompts: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    control_tokens: tuple[str, ...] = ()  # until an engine has told, as below
    reads_pictures: bool = True  # as long as no engine has told
    generates: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.fingerprint, self.name, *self.aliases)))

    def check_asked_for(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ModelNotServed(name, self.name)

    def check_ranks(self) -> None:
        """Raise InvalidJob for a head of several classes, none of which says how well a document answers."""
        if len(self.classes) > 1:
            raise InvalidJob(
                f"the worker serves {self.name!r}, whose head has {len(self.classes)} classes, not a score"
            )


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
