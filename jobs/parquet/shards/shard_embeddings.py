"""Embeddings of a shard's rows, in ShardLabels' place: what is asked for each, and what comes of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from jobs.context.answers import Answer, failed_answer
from jobs.prompts.embedding_task import pooling_values
from jobs.runs.plans.embedding_options import EMBED
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion

_NOTHING = {"embedding": None}


class ShardEmbeddings:
    """The embeddings of a run."""

    kind = "embed"
    prior: None = None
    awaits_prior = False

    def __init__(self, spec: RunSpec) -> None:
        truncation = spec.chat[0].get("truncate_prompt_tokens")
        self.values = pooling_values(
            spec.dimensions, prompt_name=spec.prompt_name, truncate_prompt_tokens=truncation
        )

    @classmethod
    def of(cls, spec: RunSpec) -> ShardEmbeddings | None:
        """Those of a run's arguments; None where it has another task."""
        return cls(spec) if spec.task == EMBED else None

    def take_prior(self, completions: Sequence[Completion]) -> None:
        """There is none."""
        raise AssertionError("a request that nobody has made")

    def answer(self, completions: Sequence[Completion]) -> Answer:
        """Return what a row has."""
        (completion,) = completions
        prompt, cached = completion.num_prompt_tokens, completion.num_cached_tokens
        if completion.embedding is None:
            return self.failed(completion.error or "the engine gave no reason", prompt, cached)
        columns = {"embedding": array("f", completion.embedding)}
        return Answer(None, completion.finish_reason, prompt, 0, cached, None, columns=columns)

    def failed(self, reason: str, prompt_tokens: int = 0, cached_tokens: int = 0) -> Answer:
        """Return what a row has that has no embedding."""
        return replace(failed_answer(reason, 1, prompt_tokens, cached_tokens), columns=_NOTHING)
