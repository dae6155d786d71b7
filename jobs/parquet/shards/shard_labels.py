"""Labels of a shard's rows: what is asked for each, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from jobs.context.answers import Answer, failed_answer
from jobs.errors import InvalidValue
from jobs.parquet.prompts.prompt_source import MessagesColumn, PromptSource
from jobs.parquet.tables.row_values import RowProblem
from jobs.prompts.labels import CONTENT_FREE, classify, scoring_of
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion

#: The columns of a row, but for those of its tokens and its error.
COLUMNS = ("label", "probability", "probabilities", "margin")

_NOTHING = dict.fromkeys(COLUMNS)


def content_free(source: PromptSource) -> str:
    """Return what a source renders where every column says nothing. Raises InvalidValue if it cannot."""
    values: Any = CONTENT_FREE
    if isinstance(source, MessagesColumn):
        values = [{"role": "user", "content": CONTENT_FREE}]
    row = pa.RecordBatch.from_pylist([dict.fromkeys(source.columns, values)])
    (found,) = source.rendered(row)
    if isinstance(found, RowProblem):
        raise InvalidValue(
            f"calibrate asks the template with {{}} for each column, which it cannot be filled with: {found}",
            repr(CONTENT_FREE),
        )
    return found


class ShardLabels:
    """The labels of a run. prior: the text of a prompt without content, None where nothing is subtracted.

    What rows have is known once `take_prior` was told of that prompt, if there is one.
    """

    kind = "score"

    def __init__(self, labels: Sequence[str], sampling: Mapping[str, Any], prior: str | None) -> None:
        self._labels, self.prior = labels, prior
        self.values = scoring_of(labels, sampling.get("truncate_prompt_tokens"))
        self._prior: list[float] | None = None
        self._prior_error: str | None = None
        self.awaits_prior = prior is not None

    @classmethod
    def of(cls, spec: RunSpec, source: PromptSource) -> ShardLabels | None:
        """Those of a run's arguments. Raises InvalidValue for a template that cannot be calibrated."""
        if spec.labels is None:
            return None
        return cls(spec.labels, spec.chat[0], content_free(source) if spec.calibrate else None)

    def take_prior(self, completions: Sequence[Completion]) -> None:
        """Take what the prompt without content gave."""
        (completion,) = completions
        self.awaits_prior = False
        if completion.loglikelihoods is None:
            self._prior_error = f"the prompt without content failed: {completion.error}"
        else:
            self._prior = [each.logprob for each in completion.loglikelihoods]

    def answer(self, completions: Sequence[Completion]) -> Answer:
        """Return what a row has."""
        (completion,) = completions
        prompt, cached = completion.num_prompt_tokens, completion.num_cached_tokens
        if completion.loglikelihoods is None or self._prior_error is not None:
            reason = completion.error or self._prior_error or "the engine gave no reason"
            return self.failed(reason, prompt, cached)
        found = classify(self._labels, [each.logprob for each in completion.loglikelihoods], self._prior)
        if found is None:
            return self.failed("a label has no finite log-likelihood", prompt, cached)
        columns = {
            "label": found.label,
            "probability": found.probability,
            "probabilities": tuple(found.probabilities.items()),
            "margin": found.margin,
        }
        return Answer(None, completion.finish_reason, prompt, 0, cached, None, columns=columns)

    def failed(self, reason: str, prompt_tokens: int = 0, cached_tokens: int = 0) -> Answer:
        """Return what a row has that has no label."""
        failed = failed_answer(reason, 1, prompt_tokens, cached_tokens)
        return replace(failed, columns=_NOTHING)
