"""What the worker uses of `engine.Engine`, so that another one can stand in its place."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from engine import (
    Completion,
    ModelIdentity,
    PoolingParams,
    RequestParams,
    RequestProgress,
    SamplingParams,
    ScoringParams,
)


class EngineLike(Protocol):
    """An engine as the main thread drives it."""

    @property
    def identity(self) -> ModelIdentity:
        """What tells the model from another."""
        ...

    @property
    def attention_backend(self) -> str:
        """Name of what computes attention."""
        ...

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do."""
        ...

    def add(
        self, request_id: str, prompt: Any, params: RequestParams, *, lane: int = 0, continued: Sequence[int] = ()
    ) -> None:
        """Queue a request: text, token ids or what `prepare` made of them. Raises InvalidRequest."""

    def prepare(
        self,
        prompt: str | list[int],
        *,
        truncate_prompt_tokens: int | None = None,
        scoring: ScoringParams | None = None,
        pooling: PoolingParams | None = None,
    ) -> Any:
        """The part of `add` that takes time with the prompt's length; for any thread, as `chat_token_ids`.

        truncate_prompt_tokens: as of SamplingParams.  scoring: where continuations are to be scored.
        pooling: where an embedding is asked for.
        """
        ...

    def prepare_grammar(self, params: SamplingParams) -> Future[Any] | None:
        """The part of `add` that a grammar takes, None where there is none; for any thread too."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request."""

    def step(self) -> list[Completion]:
        """Run one step; return what finished in it."""
        ...

    @property
    def started(self) -> Sequence[str]:
        """Ids of requests that the last step scheduled for the first time, some perhaps more than once."""
        ...

    def stats(self) -> Any:
        """A dataclass of counters."""
        ...

    def progress(self) -> Mapping[str, RequestProgress]:
        """How far requests in the batch are, by id; those that are not told have not begun."""
        ...

    def chat_token_ids(
        self, messages: list[dict[str, Any]], *, truncate_prompt_tokens: int | None = None, **options: Any
    ) -> list[int]:
        """Render messages with the model's chat template. options: what else that is given."""
        ...

    def close(self) -> None:
        """Free the model and the cache."""
