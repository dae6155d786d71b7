"""Rows that are classified: the probability of each label behind a row's prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from jobs.context.answers import Answer, failed_answer
from jobs.errors import InvalidValue
from jobs.parquet.asks.ask import ROW_FIELDS, Ask, AskedOnce, no_answer, request_of
from jobs.parquet.prompts.prompt_source import Row, RowSource
from jobs.parquet.tables.row_values import RowProblem
from jobs.prompts.labels import COLUMNS, CONTENT_FREE, classify, scoring_of
from jobs.prompts.messages import ChatOptions
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion, Request

_TYPES = (pa.string(), pa.float64(), pa.map_(pa.string(), pa.float64()), pa.float64())

LABEL_FIELDS = tuple(map(pa.field, COLUMNS, _TYPES))


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


class Labels(Ask):
    """Asks for labels' log-likelihoods behind a row's prompt. prior: a row without content, whose own go off."""

    is_tried = True

    def __init__(
        self, spec: RunSpec, sampling: Mapping[str, Any], chat: ChatOptions, is_chat: bool, prior: Row | None = None
    ) -> None:
        assert spec.labels is not None
        self._labels, self._chat, self._is_chat = spec.labels, chat, is_chat
        self._values = scoring_of(self._labels, sampling.get("truncate_prompt_tokens"))
        self._prior: list[float] | None = None
        self._prior_error: str | None = None
        if prior is not None:
            self.before = self.request(prior)

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        return [*LABEL_FIELDS, *ROW_FIELDS]

    def take_before(self, completions: Sequence[Completion]) -> None:
        (completion,) = completions
        if completion.loglikelihoods is None:
            self._prior_error = f"the prompt without content failed: {completion.error}"
        else:
            self._prior = [each.logprob for each in completion.loglikelihoods]

    def begin(self, row: Row, number: int) -> AskedOnce:
        return AskedOnce(self.request(row), self.answer)

    def request(self, row: Row, seed: int = 0) -> Request:
        return request_of(row, self._is_chat, self._values, self._chat.template, kind="score")

    def answer(self, completions: Sequence[Completion]) -> Answer:
        (completion,) = completions
        prompt, cached = completion.num_prompt_tokens, completion.num_cached_tokens
        if completion.loglikelihoods is None:
            return no_answer(completion)
        found = classify(self._labels, [each.logprob for each in completion.loglikelihoods], self._prior)
        if found is None or self._prior_error is not None:
            reason = self._prior_error or "a label has no finite log-likelihood"
            return failed_answer(reason, 1, prompt, cached)
        probabilities = found.probabilities
        values = (found.label, probabilities[found.label], tuple(probabilities.items()), found.margin)
        columns = dict(zip(COLUMNS, values, strict=True))
        return Answer(None, completion.finish_reason, prompt, 0, cached, None, columns=columns)
