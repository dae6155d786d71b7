"""Surveys a run before it is submitted: counts its prompts, has some of the prompts answered, and times a batch."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from secrets import token_hex
from typing import Any

import numpy as np
import numpy.typing as npt

from jobs.context import JobContext
from jobs.context.answers import Answer
from jobs.context.served_model import PromptMeter
from jobs.errors import InvalidJob
from jobs.parquet.asks.ask import RowAsk
from jobs.parquet.asks.kinds import ask_of, kind_of
from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converted_inputs import converted_for_now
from jobs.parquet.planning.adapters import with_all_adapters, with_named_adapters
from jobs.parquet.planning.find_files import find_files
from jobs.parquet.planning.inputs import read_inputs
from jobs.parquet.planning.own_rows import find_matches, with_seed_of
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.reuse.old_runs import OldRuns
from jobs.parquet.shards.row_items import row_runner
from jobs.parquet.shards.rows_task import RowsTask
from jobs.parquet.shards.shard_texts import rendered_shards
from jobs.parquet.tables.columns import RowProblem
from jobs.prompts.template_texts import without_breaks
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec
from jobs.runs.statistics.run_statistics import Reasons
from jobs.tasks import Completion, Request

#: The fewest and the most requests that a dry run sends to have them answered. Between these bounds, it sends one full
#: batch of the worker.
MIN_TRIED = 64
MAX_TRIED = 1024
#: The most characters of all prompts that are sent or shown. The limit keeps the job's result small enough.
MAX_TRIED_CHARS = 4 << 20
#: This many bytes of a picture count as one character.
PICTURE_BYTES_PER_CHAR = 32
MAX_REASONS = 5


class SurveyWork(RowsTask):
    """The task of a preview or a dry run, which finds out what a run would ask. Nothing is written."""

    def __init__(
        self,
        context: JobContext,
        input: str | list[str],
        first: int | None = None,
        max_rows: int | None = None,
        reuse: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        """Read the run's rows and count their tokens. Raises RunError or InvalidJob.

        first: how many of the first rows a preview shows; None for a dry run, which has some requests answered and
        times them. max_rows: the most rows to count, spread evenly over the run; None for all.
        reuse: see Submission.
        arguments: reuse_from_any_model; answers, which is False for a preview without answers; and the arguments of
        RunSpec.from_arguments.
        """
        any_model = arguments.pop("reuse_from_any_model", False)
        has_answers = arguments.pop("answers", True)
        output = arguments.pop("output", os.devnull)
        self._is_dry = first is None
        self._spec = RunSpec.from_arguments(input, output, **arguments)
        _check(self._spec, context, is_dry=self._is_dry)

        storage = Storage.of(context)
        plan = _plan_of(context, storage, self._spec)
        if context.meter is None:
            raise InvalidJob("this process has no engine to count tokens with")
        old = OldRuns(storage, reuse, plan) if reuse else None
        if old is not None:
            plan = with_seed_of(plan, old)

        meter = context.meter()
        ask = ask_of(plan, context)
        self._counts = _Counts(context, ask, meter, plan.rows, max_rows)
        files = {shard.file for shard in plan.shards if shard.rows}
        with converted_for_now(storage, plan, files) as (storage, plan):
            is_reused = np.zeros(plan.rows, bool)  # for each row of the run
            if old is not None:
                matches = find_matches(context, storage, plan, ask, old, any_model)
                is_reused = matches.places >= 0
            for start, rows in rendered_shards(context, storage, plan, ask.source):
                self._counts.add(start, rows, is_reused)

            tried = self._requests_to_try(first, meter.max_num_seqs)
            rows_by_number = _rows_to_try(context, storage, plan, ask, tried)

        #: The requests that are answered or shown, with their rows. Requests beyond MAX_TRIED_CHARS are left out.
        self._tried: list[tuple[PlannedRequest, Row]] = []
        for planned in tried:
            if planned.row in rows_by_number:
                self._tried.append((planned, rows_by_number[planned.row]))
        rows_to_ask = [row for _, row in self._tried] if has_answers else []
        row_numbers = [planned.row for planned, _ in self._tried]
        self.runner = row_runner(rows_to_ask, ask, context.checks, lambda place: row_numbers[place])
        #: The requests that were sent to answer rows, without the timed batch.
        self._sent: list[Request] = []
        #: Monotonic seconds when the timed batch was sent; 0 before.
        self._began_at = 0.0
        #: How long the timed batch has taken, and its tokens of prompts and answers.
        self._seconds = 0.0
        self._timed_tokens = 0.0

    def _requests_to_try(self, first: int | None, max_num_seqs: int) -> list[PlannedRequest]:
        """Return the requests to send or show: a preview's first requests, or a sample of a dry run's requests.

        first: how many of the first requests a preview shows; None for a dry run. max_num_seqs: the requests in a full
        batch of the worker.
        """
        requests = sorted(self._counts.requests, key=lambda request: request.row)
        if first is not None:
            return requests[:first]
        num_tried = max(MIN_TRIED, min(max_num_seqs, MAX_TRIED))
        return pick_requests(requests, num_tried)

    def requests(self) -> Iterator[Request]:
        """Yield the requests of the rows. A dry run then sends the same requests once more, to time them.

        The prompts of the timed batch begin with a random text, so that no part of them is in the engine's cache.
        """
        for request in super().requests():
            self._sent.append(request)
            yield request
        if self._is_timed_next:
            self._began_at = time.monotonic()
            beginning = token_hex(2)
            for request in self._sent:
                yield _with_beginning(request, beginning)

    @property
    def _is_timed_next(self) -> bool:
        """Whether the timed batch comes next: a dry run sends it once all its requests are answered."""
        if not self._is_dry or self._began_at > 0:
            return False
        return self.required_runner.counts.done == self.required_runner.num_places

    @property
    def has_more(self) -> bool:
        """Whether `requests` may yield more."""
        return super().has_more or self._is_timed_next

    @property
    def num_requests(self) -> int | None:
        """Return how many requests a preview sends; None for a dry run, which does not know this number beforehand."""
        return None if self._is_dry else super().num_requests

    def inspect(self, index: int, completions: Sequence[Completion]) -> None:
        """Check the answer of a request, unless the request belongs to the timed batch."""
        if index < len(self._sent):  # the timed batch is sent after these requests
            super().inspect(index, completions)

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        """Take the answer of a request. In the timed batch, only the tokens and the time of an answer are counted."""
        if index < len(self._sent):  # the timed batch is sent after these requests
            super().deliver(index, completions)
            return
        num_prompt_tokens = completions[0].num_prompt_tokens
        num_generated = sum(len(completion.token_ids) for completion in completions)
        self._timed_tokens += num_prompt_tokens + num_generated
        self._seconds = time.monotonic() - self._began_at

    def result(self) -> dict[str, Any]:
        """Return the counts, with the rows to show if this is a preview, or the estimates if it is a dry run."""
        answers = self.required_runner.answers()
        result = self._counts.to_object()
        result["num_tried"] = len(answers)
        failures = Reasons()
        # A preview without answers has rows, but no answers to go with them.
        for (planned, _), answer in zip(self._tried, answers, strict=False):
            if answer.error is not None:
                failures.add(answer.error, [planned.row])
        commonest = failures.commonest(1)
        result["num_failed"] = failures.rows
        result["commonest_failure"] = commonest[0].text if commonest else ""
        if not self._is_dry:
            shown = []
            for number, (planned, row) in enumerate(self._tried):
                shown_answer = answers[number] if answers else None
                shown.append(self._shown_row(planned, row, shown_answer))
            return {**result, "shown": shown}
        return {**result, **self._estimates(result["prompt_tokens"])}

    def _estimates(self, prompt_tokens: float) -> dict[str, float]:
        """Estimate what the whole run would take, from the requests that were answered.

        prompt_tokens: the tokens of the first prompts of all rows.
        """
        counts = self._counts
        # The weight of a tried request says how many of the counted requests it stands for.
        total_weight = sum(planned.weight for planned, _ in self._tried)
        if not self._tried:
            total_weight = 1.0  # any number but 0, because it is a divisor
        total_requests = counts.scale * len(counts.requests)  # of the whole run
        requests_per_weight = total_requests / total_weight
        # A request is computed once, and may answer several equal rows. Sums over requests say what is computed. Sums
        # over rows say what the output reports.
        generated_tokens = 0.0  # over requests
        completion_tokens = 0.0  # over rows
        rows_escalated = 0.0
        # The prompt tokens of further attempts, and of further prompts in a chain.
        later_tokens = 0.0  # over requests
        later_tokens_of_rows = 0.0
        escalation_bound = self._spec.escalate_below or 0  # no margin is below 0
        for answered in self.required_runner.answered:
            planned, _ = self._tried[answered.place]
            answer = answered.answer
            num_requests = planned.weight * requests_per_weight
            num_rows = num_requests * planned.rows
            generated_tokens += num_requests * answered.num_tokens
            completion_tokens += num_rows * answered.num_tokens
            later_tokens_of_request = max(0, answer.prompt_tokens - planned.tokens)
            later_tokens += num_requests * later_tokens_of_request
            later_tokens_of_rows += num_rows * later_tokens_of_request
            margin = answer.column("margin")
            if margin is not None and margin < escalation_bound:
                rows_escalated += num_rows

        seconds_per_token = self._seconds / max(1, self._timed_tokens)
        computed_tokens = counts.request_tokens * counts.scale + later_tokens + generated_tokens
        return {
            "generated_tokens": generated_tokens,
            "completion_tokens": completion_tokens,
            "rows_escalated": rows_escalated,
            "prompt_tokens": prompt_tokens + later_tokens_of_rows,
            "seconds": seconds_per_token * computed_tokens,
        }

    def _shown_row(
        self, planned: PlannedRequest, row: Row, answer: Answer | None
    ) -> dict[str, Any]:
        """Return a row as a preview shows it. answer: None if answers were not wanted."""
        is_json = self._spec.is_chat or row.pictures
        # If a row's value holds the text of a control token, this text has a break in it. A preview shows no breaks.
        prompt: Any = json.loads(row.prompt) if is_json else without_breaks(row.prompt)
        if not self._spec.is_chat:  # a text is shown like a chat of one message
            prompt = [{"role": "prompt", "content": prompt}]
        shown: dict[str, Any] = {
            "row": planned.row,
            "prompt": prompt,
            "prompt_tokens": planned.tokens,
        }
        if self._spec.has_row_tools and "tools" in row.own_sampling:
            shown["tools"] = row.own_sampling["tools"]
        if answer is not None:
            shown |= _shown_answer(answer)
        return shown


def _check(spec: RunSpec, context: JobContext, *, is_dry: bool) -> None:
    """Raise InvalidJob for a run that cannot be surveyed. is_dry: True for a dry run, False for a preview."""
    if not is_dry and not kind_of(spec).is_tried(spec):
        raise InvalidJob(
            "a preview shows no embeddings, no lines of openai-batch files, and only one prompt for each row: name one "
            "prompt, or use a dry run, which counts all of these"
        )
    spec.check_values(context.check_sampling)
    spec.admit(context.checks)


def _plan_of(context: JobContext, storage: Storage, spec: RunSpec) -> Plan:
    """Return the plan of a run that is not submitted. It pins all adapters that rows may name."""
    found_files = find_files(storage, spec.input, spec.output, spec.input_format)
    plan = read_inputs(context, storage, spec, found_files)
    plan = with_named_adapters(context, plan)
    return with_all_adapters(context, plan)


def _shown_answer(answer: Answer) -> dict[str, Any]:
    """Return an answer as a preview shows it."""
    shown: dict[str, Any] = {
        name: answer.column(name) for name in ("error", "label", "probabilities")
    }
    calls = answer.tool_calls
    calls_of_samples = calls if isinstance(calls, tuple) else (calls,)
    shown["tool_calls"] = [text for text in calls_of_samples if text is not None]
    if isinstance(answer.finish_reason, tuple):  # a row with several samples
        texts: Any = answer.completion or ()
        shown["completions"] = list(zip(answer.finish_reason, texts, strict=True))
    else:
        shown["completions"] = [(answer.finish_reason, answer.completion)]
    shown["tokens"] = answer.all_completion_tokens
    return shown


@dataclass(slots=True)
class PlannedRequest:
    """A request that a run would send.

    row: the first row that it answers. tokens: the tokens of its prompt. limit: its max_tokens; 0 if it has none.
    rows: how many equal rows it answers. weight: how many requests it stands for.
    """

    row: int
    tokens: int
    limit: int
    rows: int
    weight: float = 1.0


def _rows_to_try(
    context: JobContext,
    storage: Storage,
    plan: Plan,
    ask: RowAsk,
    requests: Sequence[PlannedRequest],
) -> dict[int, Row]:
    """Return the rows of these requests, by the rows' numbers.

    Once the rows have MAX_TRIED_CHARS characters, the remaining rows are left out.
    """
    wanted = {request.row for request in requests}
    rows_by_number: dict[int, Row] = {}
    chars_left = MAX_TRIED_CHARS
    for start, rows in rendered_shards(context, storage, plan, ask.source, wanted):
        for number, row in enumerate(rows, start):
            if number not in wanted or not isinstance(row, Row):
                continue
            chars_left -= len(row.prompt) + row.picture_bytes // PICTURE_BYTES_PER_CHAR
            if chars_left >= 0:
                rows_by_number[number] = row
    return rows_by_number


class _Counts:
    """Counts the prompts of a run's rows. In a large run, only some rows, evenly spread, are counted.

    total: the number of the run's rows. max_rows: about how many rows to count; None for all.
    """

    def __init__(
        self, context: JobContext, ask: RowAsk, meter: PromptMeter, total: int, max_rows: int | None
    ) -> None:
        self._context = context
        self._ask = ask
        self._meter = meter
        self._total = total
        # A row is counted if its number can be divided by `_step`.
        self._step = 1
        if max_rows:
            self._step = max(1, math.ceil(total / max_rows))
        self.requests: list[PlannedRequest] = []
        #: The prompt tokens of `requests`.
        self.request_tokens = 0
        #: The first request of equal rows, by their key.
        self._by_key: dict[bytes, PlannedRequest] = {}
        self._counts = {
            "rows_reused": 0,
            "rows_repeated": 0,
            "prompt_tokens": 0,
            "cached_tokens": 0,
        }
        self._reasons = Reasons()
        #: The tokens of the prompt that was counted last.
        self._previous_tokens: Sequence[int] = ()
        self._rows_read = 0

    @property
    def scale(self) -> float:
        """Return how many rows of the run each counted row stands for."""
        return self._total / max(1, self._rows_read)

    def add(
        self, start: int, rows: Sequence[Row | RowProblem], is_reused: npt.NDArray[np.bool_]
    ) -> None:
        """Count the rows of a shard, in the order in which they would be asked. start: the number of the first row."""
        equal_rows: dict[Row, list[int]] = {}
        # Only rows whose number can be divided by `_step` are counted.
        first_number = math.ceil(start / self._step) * self._step
        for number in range(first_number, start + len(rows), self._step):
            row = rows[number - start]
            self._rows_read += 1
            if is_reused[number]:
                self._counts["rows_reused"] += 1
            elif isinstance(row, RowProblem):
                self._reasons.add(str(row), [number])
            else:
                equal_rows.setdefault(row, []).append(number)
        for row in sorted(equal_rows):
            self._context.check_interrupted()
            self._add_equal(row, equal_rows[row])

    def _add_equal(self, row: Row, numbers: list[int]) -> None:
        """Count equal rows. If nothing is drawn at random, equal rows of all shards share one request."""
        key = self._ask.key_of(row)
        is_deterministic = self._ask.is_deterministic(row)
        known_request = self._by_key.get(key)  # the request of equal rows in earlier shards
        if known_request is not None and is_deterministic:
            known_request.rows += len(numbers)
            tokens = known_request.tokens
        else:
            try:
                requests = self._planned_requests(row, numbers, is_deterministic)
            except (InvalidJob, _Unanswerable) as error:
                self._reasons.add(str(error), numbers)
                return
            tokens = requests[0].tokens
            self._by_key.setdefault(key, requests[0])
            self.requests += requests
            self.request_tokens += tokens * len(requests)

        # If no earlier shard has an equal row, the first of these rows repeats no row.
        num_first = 1 if known_request is None else 0
        self._counts["rows_repeated"] += len(numbers) - num_first
        self._counts["prompt_tokens"] += len(numbers) * tokens

    def _planned_requests(
        self, row: Row, numbers: list[int], is_deterministic: bool
    ) -> list[PlannedRequest]:
        """Return the requests for equal rows: one for all if is_deterministic, else one for each.

        Counts their cached tokens. Raises InvalidJob or _Unanswerable.
        """
        first_requests = self._first_requests(row, numbers[0])
        prompts = [self._meter.token_ids(request) for request in first_requests]
        tokens = sum(map(len, prompts))
        limit = max(_limit_of(request) for request in first_requests)
        if is_deterministic:
            requests = [PlannedRequest(numbers[0], tokens, limit, rows=len(numbers))]
        else:
            requests = [PlannedRequest(number, tokens, limit, rows=1) for number in numbers]

        for token_ids in prompts * len(requests):  # each request sends the same prompts
            shared = _num_shared(self._previous_tokens, token_ids, self._meter.block_size)
            self._counts["cached_tokens"] += shared
            self._previous_tokens = token_ids
        return requests

    def _first_requests(self, row: Row, number: int) -> list[Request]:
        """Return the first requests of a row. Raises InvalidJob, or _Unanswerable for a row without requests."""
        item = self._ask.begin(row, number)
        try:
            step = item.send(None)
        except StopIteration as end:  # the item has returned an answer without asking
            raise _Unanswerable(end.value.error) from None
        assert isinstance(step, list), "an item begins with requests"
        return [self._ask.prepared(request) for request in step]

    def to_object(self) -> dict[str, Any]:
        """Return the counts, scaled to the whole run, and the commonest reasons of errors."""
        counts_of_read_rows = {
            **self._counts,
            "rows_failing": self._reasons.rows,
            "requests": len(self.requests),
        }
        scaled = {name: count * self.scale for name, count in counts_of_read_rows.items()}
        return {
            "num_rows": self._total,
            "rows_read": self._rows_read,
            "reasons": [vars(reason) for reason in self._reasons.commonest(MAX_REASONS)],
            **scaled,
        }


class _Unanswerable(Exception):
    """Raised for a row that has no request to send. Its text is the row's error."""


def _limit_of(request: Request) -> int:
    """Return a request's max_tokens; 0 if the request has none."""
    limit = request.sampling.get("max_tokens")
    return limit if type(limit) is int else 0


def _with_beginning(request: Request, beginning: str) -> Request:
    """Return a request that begins with `beginning`, so that no part of its prompt is in the engine's cache.

    Before a prompt of token ids, some of its own ids are repeated in a random order instead. A request of another kind,
    such as for embeddings, stays as it is, because it uses no cache.
    """
    if request.kind not in ("generate", "score"):
        return request
    prompt = request.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):  # token ids
        ids_in_front = Random(beginning).choices(prompt, k=len(beginning))
        return replace(request, prompt=[*ids_in_front, *prompt])
    if request.messages is None:
        return replace(request, prompt=_prefixed(request.prompt, beginning))
    first, *later = request.messages
    content = _prefixed(first.get("content") or "", beginning)
    return replace(request, messages=[{**first, "content": content}, *later])


def _prefixed(content: Any, beginning: str) -> Any:
    """Return a message's content with `beginning` in front. content: a text, or the parts of a message."""
    if isinstance(content, str):
        return beginning + content
    return [{"type": "text", "text": beginning}, *content]


def pick_requests(requests: Sequence[PlannedRequest], count: int) -> list[PlannedRequest]:
    """Choose at most `count` requests. Large requests are more likely to be chosen.

    The weight of a chosen request is set to the number of requests that it stands for.
    """
    ordered = sorted(requests, key=lambda request: (request.limit, request.tokens, request.row))
    if len(ordered) <= count:
        return ordered
    # The 1 gives even the smallest request some size.
    features = [(1, request.tokens, request.limit, request.rows) for request in ordered]
    columns = np.array(features, np.float64)
    averages = np.maximum(columns.mean(axis=0), 1e-9)
    # Each feature is divided by its average over all requests. sizes[i] is the sum for request i.
    sizes = (columns / averages).sum(axis=1)
    # A request of average size is expected to be chosen count / len(ordered) times.
    expected_times = sizes * count / sizes.sum()
    # times[i]: how often request i is chosen. Running sums of the expected times are rounded, not the times themselves,
    # so that the chosen times add up to `count`.
    rounded_sums = np.floor(np.cumsum(expected_times) + 0.5)
    times = np.diff(rounded_sums, prepend=0)
    picked = []
    for index in np.flatnonzero(times):
        request = ordered[index]
        request.weight = float(times[index] / expected_times[index])
        picked.append(request)
    return picked


def _num_shared(previous: Sequence[int], token_ids: Sequence[int], block_size: int) -> int:
    """Return how many tokens of a prompt are in a cache that holds only the previous prompt.

    Only whole blocks are cached. The last token is never taken from the cache.
    """
    shared = 0
    end = block_size
    while end < len(token_ids) and previous[shared:end] == token_ids[shared:end]:
        shared = end
        end += block_size
    return shared
