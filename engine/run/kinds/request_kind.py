"""RequestKind: what each kind of request says of itself, and the records that it is given."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from engine.checkpoint.heads import Classes
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.pooling import Pooling
from engine.run.config import EngineConfig
from engine.run.new_sequences import NewSequences
from engine.schedule.outputs import Completion
from engine.schedule.prepared_prompt import BlockKey, PreparedPrompt
from engine.schedule.sequence import Sequence
from engine.text.prompts import Prompt, PromptReader
from engine.text.tokenizer import Tokenizer

Params = TypeVar("Params")
"""The class of a kind's parameters."""


@dataclass(frozen=True)
class LoadedModel:
    """A model and its parts as an engine has loaded them. Kinds of requests take from it what they need.

    generates: the model has an LM head. classes, pooling: None if the checkpoint has none.
    keys_of: returns the keys of the full blocks of token ids.
    """

    config: EngineConfig
    model: ModelConfig
    generates: bool
    classes: Classes | None
    pooling: Pooling | None
    tokenizer: Tokenizer
    prompts: PromptReader
    sequences: NewSequences
    keys_of: Callable[[list[int]], list[BlockKey]]


@dataclass(frozen=True)
class NewRequest(Generic[Params]):
    """A request whose parameters are checked and whose prompt is prepared. The fields are those of `Engine.add`."""

    request_id: str
    prompt: PreparedPrompt
    params: Params
    lane: int
    continued: Collection[int]
    resumed: Mapping[int, Collection[int]]


class RequestKind(ABC, Generic[Params]):
    """A kind of request says how its prompts are prepared, and how its sequences and completions are made.

    params: the class of its parameters, by which the engine finds the kind.
    generates: whether its sequences generate tokens.
    reads_pictures: whether its prompts may hold pictures.
    """

    params: ClassVar[type[Any]]
    generates: ClassVar[bool] = False
    reads_pictures: ClassVar[bool] = True

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    @abstractmethod
    def check(self, params: Params) -> None:
        """Raise UnsupportedTask or InvalidSampling if this model cannot answer requests with these parameters."""

    @abstractmethod
    def prepare(self, prompt: Prompt, params: Params) -> PreparedPrompt:
        """Tokenize, cut and check a prompt without pictures. For any thread. Raises InvalidRequest or a subclass."""

    def is_prepared(self, prompt: PreparedPrompt, params: Params) -> bool:
        """Return whether a prompt is prepared for these parameters; it may have been prepared for others."""
        return True

    def prepare_grammar(self, params: Params) -> Future[Any] | None:
        """Start compiling the grammar that the text must follow; return None if there is none. For any thread."""
        return None

    @abstractmethod
    def sequences(self, request: NewRequest[Params]) -> list[Sequence]:
        """Make a request's sequences, at least one. Raises InvalidRequest or a subclass."""

    def is_complete(self, seq: Sequence) -> bool:
        """Return whether nothing is missing for the completion of a finished sequence."""
        return True

    @abstractmethod
    def completion(self, seq: Sequence) -> Completion | None:
        """Make the completion of a finished sequence; return None if one that finishes later will give it."""
