"""What all kinds of asks share."""

import abc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from jobs.context.answers import Answer, failed_answer
from jobs.parquet.asks.row_keys import RowKeys
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import RowSource
from jobs.prompts.attempts import hashed_seed
from jobs.prompts.messages import ChatOptions
from jobs.prompts.pictures import filled
from jobs.runs.plans.prompt_steps import ROW_COLUMNS
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion, Request

#: What the output adds to the input's columns; always these types, also when a part holds only nulls.
OUTPUT_FIELDS = (
    pa.field("completion", pa.string()),
    pa.field("finish_reason", pa.string()),
    pa.field("prompt_tokens", pa.int64()),
    pa.field("completion_tokens", pa.int64()),
    pa.field("cached_tokens", pa.int64()),
    pa.field("error", pa.string()),
)

ROW_FIELDS = tuple(field for field in OUTPUT_FIELDS if field.name in ROW_COLUMNS)


class Asked(abc.ABC):
    """A row under way. requests: those with which it begins."""

    requests: Sequence[Request]

    @abc.abstractmethod
    def then(self, place: int, completions: Sequence[Completion]) -> Answer | Sequence[Request]:
        """Take all samples of a row's request; return its answer, or what is asked next, once none is awaited."""

    def inspect(self, place: int, completions: Sequence[Completion]) -> None:  # noqa: B027 - most check not
        """Check what `then` will take, in any thread. Raises JobsError."""


class Ask(abc.ABC):
    """What a run asks of each row.

    before: asked before all rows. inspects: whether answers are checked. is_single: each row begins with one request.
    is_tried: preview and dry run may try it. is_compared: `verify` may compare its answers. source: makes rows. keys:
    name what these ask. now: Unix seconds that chats take for the present, if the model's template writes the time.
    """

    source: RowSource
    keys: RowKeys

    before: Request | None = None
    now: float | None = None
    inspects = False
    is_single = is_compared = True
    is_tried = False

    @staticmethod
    @abc.abstractmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        """Return the columns that a run adds, without its prefix. embedding_size: numbers of each, where it embeds."""

    @abc.abstractmethod
    def begin(self, row: Row, number: int) -> Asked:
        """Begin to ask a row, which has this number in the run. Raises RowProblem."""

    def failed(self, reason: str) -> Answer:
        return failed_answer(reason)

    def key_of(self, row: Row) -> bytes:
        """Return what tells a row's answer, given a model: see RowKeys."""
        return self.keys.of(row)

    def timed(self, request: Request) -> Request:
        """Return a request with the run's time, so that its prompt is the same whenever it is asked."""
        if self.now is None or request.messages is None:
            return request
        return replace(request, chat_options={**request.chat_options, "now": self.now})

    def is_greedy(self, row: Row) -> bool:
        """Return whether equal rows have equal answers."""
        return True

    def take_before(self, completions: Sequence[Completion]) -> None:  # noqa: B027 - most ask nothing before
        """Take the answer to `before`: rows are asked once it is there."""


class AskedOnce(Asked):
    """A row with one request. answer: makes the row's answer of its completions."""

    def __init__(self, request: Request, answer: Callable[[Sequence[Completion]], Answer]) -> None:
        self.requests, self._answer = [request], answer

    def then(self, place: int, completions: Sequence[Completion]) -> Answer | Sequence[Request]:
        return self._answer(completions)


def request_of(
    row: Row, is_chat: bool, values: Mapping[str, Any], options: ChatOptions | None = None, kind: str = "generate"
) -> Request:
    """Return the request of a row's prompt. options: as chat_options of Request."""
    parts = json.loads(row.prompt) if is_chat or row.pictures else None
    if parts and row.pictures:
        parts = filled(parts, row.pictures)
    if is_chat:
        return Request(None, parts, values, options or {}, kind)
    return Request(parts or row.prompt, None, values, kind=kind)


def no_answer(completion: Completion, n: int = 1) -> Answer:
    reason = completion.error or "the engine gave no reason"
    return failed_answer(reason, n, completion.num_prompt_tokens, completion.num_cached_tokens)


def row_seed(run_seed: int, row: int) -> int:
    """Return a row's seed: the same on every worker and in every attempt; 0 to 2**63 - 1."""
    return hashed_seed(f"{run_seed}:{row}")
