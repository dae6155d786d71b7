"""Rows that have one prompt each; it is asked again where a check does not take the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jobs.context.answers import Answer, failed_answer
from jobs.context.check_processes import Checks
from jobs.parquet.asks.ask import Ask, Asked, AskedOnce, request_of, row_seed
from jobs.parquet.prompts.prompt_source import Row
from jobs.prompts.attempts import Attempted, Attempts, num_generated
from jobs.prompts.responses import parse_tool_calls, with_ids
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion, Request


class Generate(Ask):
    """Asks for `n` completions of each row. seed: the run's; a row's own follows from it."""

    def __init__(self, spec: RunSpec, seed: int, checks: Checks) -> None:
        sampling, self._chat = spec.chat
        self._shared = without_seed(sampling)
        self._is_chat, self._n, self._seed = spec.is_chat, spec.n, seed
        self._repairs, self._checks = spec.repairs, checks
        self.inspects = spec.repairs.check is not None

    def is_greedy(self, row: Row) -> bool:
        values = row.own_sampling if row.sampling else self._shared
        return values.get("temperature", self._shared.get("temperature")) == 0

    def begin(self, row: Row, number: int) -> Asked:
        values = {**self._shared, **row.own_sampling}
        if values.get("temperature") != 0:
            values = {"seed": row_seed(self._seed, number), **values}
        request = request_of(row, self._is_chat, values, self._chat.template)
        if not self._repairs.is_asked_for:
            return AskedOnce(request, self._answer)
        given = json.loads(row.values) if row.values else None
        return _Tried(request, Attempts(request, given, self._repairs, self._checks))

    def failed(self, reason: str) -> Answer:
        return failed_answer(reason, self._n)

    def _answer(self, completions: Sequence[Completion]) -> Answer:
        return answer_of(completions, self._n, self._chat.has_tools)


class _Tried(Asked):
    """A row whose answer may be tried again."""

    def __init__(self, request: Request, attempts: Attempts) -> None:
        self.requests, self._attempts = [request], attempts

    def inspect(self, place: int, completions: Sequence[Completion]) -> None:
        self._attempts.inspect(completions[0])

    def then(self, place: int, completions: Sequence[Completion]) -> Answer | Sequence[Request]:
        following = self._attempts.deliver(completions[0])
        return answer_of([self._attempts.outcome]) if following is None else [following]


def without_seed(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's values for its rows, whose seeds follow from the run's."""
    return {name: value for name, value in sampling.items() if name != "seed"}


def answer_of(completions: Sequence[Completion], n: int = 1, has_tools: bool = False) -> Answer:
    """Return what a row has of its samples. With one of them the row fails."""
    samples = sorted(completions, key=lambda sample: sample.index)
    first = samples[0]
    prompt, cached = first.num_prompt_tokens, first.num_cached_tokens
    failed = next((each for each in samples if each.finish_reason == "error"), None)
    if failed is not None:
        reason = failed.error or "the engine gave no reason"
        return replace(failed_answer(reason, n, prompt, cached), attempts=1)
    parts = [_texts_of(each, has_tools) for each in samples]
    if n == 1:
        ((text, reason, calls),) = parts
        tokens = num_generated(first)
        answer = Answer(text, reason, prompt, tokens, cached, first.error, first.reasoning, calls)
        if not isinstance(first, Attempted):
            return answer
        return replace(answer, attempts=first.attempts, check_error=first.check_error)
    texts, reasons, all_calls = zip(*parts, strict=True)
    counts = tuple(len(each.token_ids) for each in samples)
    reasonings = tuple(each.reasoning for each in samples)
    return Answer(texts, reasons, prompt, counts, cached, None, reasonings, all_calls)


def _texts_of(sample: Completion, has_tools: bool) -> tuple[str, str, str | None]:
    """Return a sample's content, why it ended, and its calls of tools as JSON."""
    calls, content = parse_tool_calls(sample.text) if has_tools else ([], sample.text)
    if not calls:
        return sample.text, sample.finish_reason, None
    reason = "tool_calls" if sample.finish_reason == "stop" else sample.finish_reason
    return content, reason, json.dumps(with_ids(calls, sample.text), ensure_ascii=False)
