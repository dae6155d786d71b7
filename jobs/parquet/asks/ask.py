"""Defines RowAsk, the base class of what a run asks of each row, and the functions that its subclasses share."""

import abc
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import pyarrow as pa

from jobs.context import JobContext
from jobs.context.adapters import ADAPTER, Adapters, PlannedAdapters
from jobs.context.answers import Answer, failed_answer
from jobs.items.item import Ask, Item
from jobs.parquet.asks.row_keys import RowKeys
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import RowSource
from jobs.parquet.tables.columns import RowProblem
from jobs.prompts.generated import NO_REASON, hashed_seed
from jobs.prompts.pictures import filled
from jobs.prompts.scoring.labels import Labels
from jobs.runs.plans.option_checks import STRUCT
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.prompt_steps import ROW_COLUMNS
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion, Request

#: The columns that the output adds to the input's. They always have these types, even if a part holds only nulls.
OUTPUT_FIELDS = (
    pa.field("completion", pa.string()),
    pa.field("finish_reason", pa.string()),
    pa.field("prompt_tokens", pa.int64()),
    pa.field("completion_tokens", pa.int64()),
    pa.field("cached_tokens", pa.int64()),
    pa.field("error", pa.string()),
)

#: The columns about a row as a whole, without the columns about its completion.
ROW_FIELDS = tuple(field for field in OUTPUT_FIELDS if field.name in ROW_COLUMNS)

#: The type of a column with the probability of each label.
PROBABILITIES = pa.map_(pa.string(), pa.float64())


def output_fields(columns: Mapping[str, str], embedding_size: int = 0) -> list[pa.Field]:
    """Return the Arrow fields of some columns.

    columns: the type of each column, by name. A type is one of Arrow's names, "probabilities" or "embedding".
    """
    our_types = {
        "probabilities": PROBABILITIES,
        "embedding": pa.list_(pa.float32(), embedding_size),
    }
    fields = []
    for name, type_name in columns.items():
        is_ours = type_name in our_types
        column_type = our_types[type_name] if is_ours else pa.type_for_alias(type_name)
        fields.append(pa.field(name, column_type))
    return fields


def label_fields(spec: RunSpec) -> list[pa.Field]:
    """Return the columns of a row that is scored against a run's labels.

    The labels' probabilities are a map, or a struct if the run asks for that.
    """
    fields = output_fields(Labels.columns)
    if spec.probabilities != STRUCT:
        return fields
    struct = pa.struct([(label, pa.float64()) for label in spec.labels or ()])
    fields_with_struct = []
    for field in fields:
        has_probabilities = field.type == PROBABILITIES
        fields_with_struct.append(field.with_type(struct) if has_probabilities else field)
    return fields_with_struct


class RowAsk(Ask[Answer]):
    """What a run asks of each row.

    source: makes the rows.
    keys: makes the rows' keys.
    opening_request: the request that is sent before the rows are asked; None if the run has no such request.
    adapters: the adapters that the run has pinned.
    now: the Unix seconds that chats take as the present time; None if the model's template writes no time.
    """

    source: RowSource
    keys: RowKeys
    opening_request: Request | None = None
    now: float | None = None
    adapters: Adapters = PlannedAdapters()

    @classmethod
    @abc.abstractmethod
    def of_plan(cls, plan: Plan, context: JobContext, source: RowSource) -> Self:
        """Return the object that asks the rows of a run. `ask_of` then sets its source and its keys."""

    @staticmethod
    @abc.abstractmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        """Return the columns that a run adds. Their names do not have the run's prefix yet.

        embedding_size: how many numbers an embedding has.
        """

    @staticmethod
    def is_tried(spec: RunSpec) -> bool:
        """Whether a preview or dry run may ask for the answers of some of the run's rows."""
        return False

    @staticmethod
    def is_compared(spec: RunSpec) -> bool:
        """Whether `verify` may compare the run's answers."""
        return True

    @abc.abstractmethod
    def item(self, row: Row, number: int) -> Item[Answer]:
        """Return the item of a row: it yields the row's requests and returns its answer. It may raise RowProblem.

        number: the row's number in the run.
        """

    def begin(self, row: Row, number: int) -> Item[Answer]:
        """Return the item of a row. If the row cannot be asked, the error of its answer says why."""
        return self._with_problems(self.item(row, number))

    def _with_problems(self, item: Item[Answer]) -> Item[Answer]:
        """Run an item. If it raises RowProblem, return an answer whose error is the problem."""
        try:
            return (yield from item)
        except RowProblem as problem:
            return self.failed(str(problem))

    def failed(self, reason: str) -> Answer:
        """Return the answer of a row that cannot be asked."""
        return failed_answer(reason)

    def key_of(self, row: Row) -> bytes:
        """Return the key that names what a row asks. The model is not part of this key; see row_keys.py."""
        return self.keys.key_of(row)

    def prepared(self, request: Request) -> Request:
        """Return a request whose chat takes the run's time as the present time, even if the request is sent later.

        If the request names an adapter, the returned request pins the adapter's files as the run does.
        """
        if request.sampling.get(ADAPTER) is not None:
            pinned_values = self.adapters.pinned_values(request.sampling)
            request = replace(request, sampling=pinned_values)
        if self.now is None or request.messages is None:
            return request
        return replace(request, chat_options={**request.chat_options, "now": self.now})

    def is_deterministic(self, row: Row) -> bool:
        """Return whether equal rows have equal answers."""
        return True

    def is_remembered(self, answer: Answer) -> bool:
        """Whether equal rows of other shards get this answer. An answer with an error is given to no other row."""
        return answer.error is None


def prompt_of(row: Row, *, is_json: bool) -> Any:
    """Return a row's prompt: a text, chat messages, content parts, or a query with its document.

    is_json: whether the row holds the prompt as JSON. The prompt of a row with pictures is always JSON, because it is a
    list of parts.
    """
    if not is_json and not row.pictures:
        return row.prompt
    prompt = json.loads(row.prompt)
    if row.pictures:
        return filled(prompt, row.pictures)
    return prompt


def answer_of_failed_request(completion: Completion, n: int = 1) -> Answer:
    """Return the answer of a row whose request failed. n: how many completions the row should have."""
    reason = completion.error or NO_REASON
    return failed_answer(reason, n, completion.num_prompt_tokens, completion.num_cached_tokens)


def row_seed(run_seed: int, row: int) -> int:
    """Return a row's seed, from 0 to 2**63 - 1. It is the same on every worker and in every attempt."""
    return hashed_seed(f"{run_seed}:{row}")
