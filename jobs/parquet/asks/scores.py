"""Scores rows in one of the ways that jobs/prompts/scoring defines. Nothing is generated for these rows."""

from dataclasses import replace
from typing import Any, Self

import pyarrow as pa

from jobs.context import JobContext
from jobs.context.adapters import ADAPTER
from jobs.context.answers import Answer, failed_answer
from jobs.errors import InvalidValue
from jobs.items.item import Item, Samples, asked_once
from jobs.parquet.asks.ask import ROW_FIELDS, RowAsk, label_fields, output_fields, prompt_of
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import RowSource
from jobs.parquet.tables.columns import RowProblem
from jobs.prompts.arguments import Unusable
from jobs.prompts.messages import ChatOptions
from jobs.prompts.scoring.kind import Scoring
from jobs.prompts.scoring.labels import CONTENT_FREE, Labels
from jobs.prompts.scoring.table import RUN_SCORINGS
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request


def scoring_of(spec: RunSpec) -> type[Scoring] | None:
    """Return the scoring of a run's rows; None for a run that generates."""
    if spec.labels is not None:
        return Labels
    return RUN_SCORINGS.get(spec.task)


class Scores(RowAsk):
    """Asks each row once, to score it. Nothing is generated.

    chat_options: the options of rows that are chats; None for other rows.
    prior: a row without content. It is asked before the run's rows, to calibrate their scores. None for a run that
    does not calibrate.
    """

    def __init__(
        self, scoring: Scoring, chat_options: ChatOptions | None = None, prior: Row | None = None
    ) -> None:
        self._scoring = scoring
        self._chat_options = chat_options
        if prior is not None:
            self.opening_request = self.request(prior)

    @classmethod
    def of_plan(cls, plan: Plan, context: JobContext, source: RowSource) -> Self:
        """Return the object that scores the rows of a run."""
        spec = plan.spec
        kind = scoring_of(spec)
        assert kind is not None, "a run that generates has no scoring"
        chat_options = spec.chat.options if spec.is_chat else None
        prior = content_free(spec, source) if spec.calibrate else None
        scoring = kind.of_run(vars(spec), context.model)
        if ADAPTER in spec.sampling:  # the requests name the run's adapter
            values = {**scoring.values, ADAPTER: spec.sampling[ADAPTER]}
            scoring = replace(scoring, values=values)
        return cls(scoring, chat_options, prior)

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        """Return the columns of the run's scoring."""
        kind = scoring_of(spec)
        assert kind is not None, "a run that generates has no scoring"
        if kind is Labels:
            return [*label_fields(spec), *ROW_FIELDS]
        return [*output_fields(kind.columns, embedding_size), *ROW_FIELDS]

    @staticmethod
    def is_tried(spec: RunSpec) -> bool:
        """Whether a preview or dry run may ask for the scores of some of the run's rows."""
        kind = scoring_of(spec)
        return kind is not None and kind.is_tried

    @staticmethod
    def is_compared(spec: RunSpec) -> bool:
        """Whether `verify` may compare the run's scores."""
        kind = scoring_of(spec)
        return kind is not None and kind.is_compared

    def opening(self) -> Item[None] | None:
        """Return an item that asks a row without content before the run's rows; None if the run does not calibrate."""
        if self.opening_request is None:
            return None
        return self._calibrate(self.opening_request)

    def _calibrate(self, request: Request) -> Item[None]:
        """Ask for the score of a row without content. This score then corrects the scores of the run's rows."""
        (completion,) = yield from asked_once(request)
        self._scoring = self._scoring.calibrated(completion)

    def item(self, row: Row, number: int) -> Item[Answer]:
        """Ask for the scores of a row, with one request."""
        return self.prompt_item(row)

    def prompt_item(self, row: Row, seed: int = 0) -> Item[Answer]:
        """Ask a row's prompt once. Nothing is drawn at random, so the seed does not matter."""
        item = asked_once(self.request(row))
        del row  # the item holds what it still needs
        samples = yield from item
        return self.answer(samples)

    def request(self, row: Row) -> Request:
        """Return the request of a row. Raises RowProblem."""
        is_json = self._chat_options is not None or self._scoring.asks_pairs
        request = self._scoring.request(prompt_of(row, is_json=is_json), self._chat_options)
        if isinstance(request, Unusable):
            raise RowProblem(request.reason)
        return request

    def answer(self, samples: Samples) -> Answer:
        """Return a row's answer from its one completion."""
        (completion,) = samples
        num_prompt_tokens = completion.num_prompt_tokens
        num_cached_tokens = completion.num_cached_tokens
        scored = self._scoring.scored(completion)
        if scored.error is not None:
            return failed_answer(
                scored.error, prompt_tokens=num_prompt_tokens, cached_tokens=num_cached_tokens
            )
        return Answer(
            completion=None,
            finish_reason=completion.finish_reason,
            prompt_tokens=num_prompt_tokens,
            completion_tokens=0,
            cached_tokens=num_cached_tokens,
            error=None,
            columns=scored.values,
        )


def content_free(spec: RunSpec, source: RowSource) -> Row:
    """Return a row that has CONTENT_FREE in each column. Raises InvalidValue if no prompt can be made of this row."""
    content: Any = CONTENT_FREE
    if spec.messages_column is not None:
        content = [{"role": "user", "content": CONTENT_FREE}]
    values = dict.fromkeys(source.columns, content)
    batch = pa.RecordBatch.from_pylist([values])
    [row] = source.rows(batch)
    if isinstance(row, RowProblem):
        # InvalidValue puts the value into the braces.
        raise InvalidValue(
            f"calibrate puts {{}} into each column, and no prompt can be made of that: {row}",
            repr(CONTENT_FREE),
        )
    return row
