"""Rows for which nothing is generated: they get probabilities of labels or classes, a relevance, or an embedding."""

import abc
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from jobs.context.answers import Answer, failed_answer
from jobs.errors import InvalidValue
from jobs.items.item import Item, Samples, asked_once
from jobs.parquet.asks.ask import ROW_FIELDS, RowAsk, no_answer, request_of
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import RowSource
from jobs.parquet.tables.columns import RowProblem
from jobs.prompts.arguments import Unusable
from jobs.prompts.labels import COLUMNS, CONTENT_FREE, classify, scoring_of, truncation
from jobs.prompts.messages import ChatOptions
from jobs.prompts.scoring_tasks import (
    NO_RELEVANCE,
    best_class,
    pooling_values,
    relevance,
    relevance_request,
)
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion, Request

_TYPES = (pa.string(), pa.float64(), pa.map_(pa.string(), pa.float64()), pa.float64())
LABEL_FIELDS = tuple(map(pa.field, COLUMNS, _TYPES))


class Scores(RowAsk):
    """Asks each row once. kind, _values: of its request. columns: what the output gets beside those of every row."""

    kind: ClassVar[str]
    columns: ClassVar[Sequence[pa.Field]] = ()
    is_compared = False
    _values: Mapping[str, Any]

    @classmethod
    def fields(cls, spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        return [*cls.columns, *ROW_FIELDS]

    def item(self, row: Row, number: int) -> Item[Answer]:
        """Ask a row once."""
        return self.prompt_item(row)

    def prompt_item(self, row: Row, seed: int = 0) -> Item[Answer]:
        """Ask a row's prompt once; nothing is drawn, so that no seed matters."""
        item = asked_once(self.request(row))
        del row
        return self.answer((yield from item))

    def request(self, row: Row) -> Request:
        """Return the request of a row. Raises RowProblem."""
        return request_of(row, False, self._values, kind=self.kind)

    def answer(self, samples: Samples) -> Answer:
        """Return a row's answer from its one completion."""
        (completion,) = samples
        prompt, cached = completion.num_prompt_tokens, completion.num_cached_tokens
        found = self.found(completion)
        if isinstance(found, Mapping):
            return Answer(None, completion.finish_reason, prompt, 0, cached, None, columns=found)
        return no_answer(completion) if found is None else failed_answer(found, 1, prompt, cached)

    @abc.abstractmethod
    def found(self, completion: Completion) -> Mapping[str, Any] | str | None:
        """Return the values of the columns, or why there are none; None where the engine says why."""


def content_free(spec: RunSpec, source: RowSource) -> Row:
    """Return what a row asks where every column says nothing. Raises InvalidValue if it cannot."""
    values: Any = CONTENT_FREE
    if spec.messages_column is not None:
        values = [{"role": "user", "content": CONTENT_FREE}]
    (found,) = source.rows(pa.RecordBatch.from_pylist([dict.fromkeys(source.columns, values)]))
    if isinstance(found, RowProblem):
        raise InvalidValue(
            f"calibrate asks the template with {{}} for each column, which it cannot be filled with: {found}",
            repr(CONTENT_FREE),
        )
    return found


class Labels(Scores):
    """Asks for labels' log-likelihoods behind a row's prompt. prior: a row without content, whose own go off."""

    kind, columns = "score", LABEL_FIELDS
    is_tried = is_compared = True

    def __init__(
        self,
        spec: RunSpec,
        sampling: Mapping[str, Any],
        chat: ChatOptions,
        is_chat: bool,
        prior: Row | None = None,
    ) -> None:
        assert spec.labels is not None
        self._labels, self._chat, self._is_chat = spec.labels, chat, is_chat
        self._values = scoring_of(self._labels, sampling.get("truncate_prompt_tokens"))
        self._prior: list[float] | None = None
        self._prior_error: str | None = None
        if prior is not None:
            self.before = self.request(prior)

    def opening(self) -> Item[None] | None:
        """Return what asks the row without content, before the others."""
        return None if self.before is None else self._asked_prior(self.before)

    def _asked_prior(self, before: Request) -> Item[None]:
        (completion,) = yield from asked_once(before)
        if completion.loglikelihoods is None:
            self._prior_error = f"the prompt without content failed: {completion.error}"
        else:
            self._prior = [each.logprob for each in completion.loglikelihoods]

    def request(self, row: Row) -> Request:
        return request_of(row, self._is_chat, self._values, self._chat, self.kind)

    def found(self, completion: Completion) -> Mapping[str, Any] | str | None:
        if completion.loglikelihoods is None:
            return None
        found = classify(
            self._labels, [each.logprob for each in completion.loglikelihoods], self._prior
        )
        if found is None or self._prior_error is not None:
            return self._prior_error or "a label has no finite log-likelihood"
        probabilities = found.probabilities
        values = (
            found.label,
            probabilities[found.label],
            tuple(probabilities.items()),
            found.margin,
        )
        return dict(zip(COLUMNS, values, strict=True))


class Classes(Scores):
    """Asks for the classes that the model's own head gives a row. A head with one output gives the score alone."""

    kind, columns = "classify", tuple(map(pa.field, ("label", "score", "probabilities"), _TYPES))

    def __init__(self, spec: RunSpec) -> None:
        self._values = truncation(spec.chat[0].get("truncate_prompt_tokens"))

    def found(self, completion: Completion) -> Mapping[str, Any] | None:
        if (scores := completion.class_scores) is None:
            return None
        if (label := best_class(scores)) is None:
            return {"score": next(iter(scores.values()))}
        return {"label": label, "score": scores[label], "probabilities": tuple(scores.items())}


class Relevance(Scores):
    """Asks how well a row's document answers its query. has_head: of a cross-encoder; other models say yes or no."""

    columns = (pa.field("score", pa.float64()),)

    def __init__(self, has_head: bool) -> None:
        self._has_head = has_head

    def request(self, row: Row) -> Request:
        query, document = json.loads(row.prompt)
        request = relevance_request(query, document, self._has_head)
        if isinstance(request, Unusable):
            raise RowProblem(request.reason)
        return request

    def found(self, completion: Completion) -> Mapping[str, Any] | str | None:
        if completion.class_scores is None and completion.loglikelihoods is None:
            return None
        score = relevance(completion)
        return NO_RELEVANCE if score is None else {"score": score}


class Embeddings(Scores):
    kind = "embed"

    def __init__(self, spec: RunSpec) -> None:
        truncation = spec.chat[0].get("truncate_prompt_tokens")
        self._values = pooling_values(
            dimensions=spec.dimensions,
            prompt_name=spec.prompt_name,
            truncate_prompt_tokens=truncation,
        )

    @classmethod
    def fields(cls, spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        return [pa.field("embedding", pa.list_(pa.float32(), embedding_size)), *ROW_FIELDS]

    def found(self, completion: Completion) -> Mapping[str, Any] | None:
        return (
            None
            if completion.embedding is None
            else {"embedding": array("f", completion.embedding)}
        )
