"""Rows that a model's own head classifies."""

from collections.abc import Sequence

import pyarrow as pa

from jobs.context.answers import Answer
from jobs.parquet.asks.ask import ROW_FIELDS, Ask, AskedOnce, no_answer, request_of
from jobs.parquet.prompts.prompt_source import Row
from jobs.prompts.labels import truncation
from jobs.prompts.scoring_tasks import best_class
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion

_FIELDS = (
    pa.field("label", pa.string()),
    pa.field("score", pa.float64()),
    pa.field("probabilities", pa.map_(pa.string(), pa.float64())),
)


class Classes(Ask):
    """Asks for the classes of each row. A head with one output gives the score alone."""

    is_compared = False

    def __init__(self, spec: RunSpec) -> None:
        self._values = truncation(spec.chat[0].get("truncate_prompt_tokens"))

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        return [*_FIELDS, *ROW_FIELDS]

    def begin(self, row: Row, number: int) -> AskedOnce:
        return AskedOnce(request_of(row, False, self._values, kind="classify"), self._answer)

    def _answer(self, completions: Sequence[Completion]) -> Answer:
        (completion,) = completions
        scores = completion.class_scores
        if scores is None:
            return no_answer(completion)
        label = best_class(scores)
        values = (label, scores[label], tuple(scores.items())) if label is not None else (None, *scores.values(), None)
        columns = {field.name: value for field, value in zip(_FIELDS, values, strict=True)}
        return Answer(None, completion.finish_reason, completion.num_prompt_tokens, 0, 0, None, columns=columns)
