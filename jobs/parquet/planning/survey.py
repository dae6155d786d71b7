"""A look at a run before it is one: all prompts are counted, a few answered, and full batches of them timed."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, repeat
from secrets import token_hex
from typing import Any

from jobs.context import JobContext
from jobs.context.answers import Answer
from jobs.context.served_model import PromptMeter
from jobs.errors import InvalidJob
from jobs.parquet.asks.ask import Ask
from jobs.parquet.asks.kinds import ask_of, kind_of
from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converted_inputs import converted_for_now
from jobs.parquet.planning.find_files import find_files
from jobs.parquet.planning.inputs import read_inputs
from jobs.parquet.planning.planner import check_columns
from jobs.parquet.planning.reusing import match
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.reuse.old_runs import OldRuns
from jobs.parquet.shards.rows_task import RowsTask
from jobs.parquet.shards.shard_requests import ShardRequests
from jobs.parquet.shards.shard_texts import rendered_shards
from jobs.parquet.tables.row_values import RowProblem
from jobs.runs.plans.spec import RunSpec
from jobs.runs.statistics.reasons import Reasons
from jobs.tasks import Completion, Request

#: Requests that are answered; seconds for which full batches are timed, and rows of one at most.
NUM_TRIED, TIMED_S, MAX_BATCH = 64, 2.0, 256

#: Of the prompts that are answered, in characters, for the result's limit; of pictures so many bytes are one.
MAX_PICKED_CHARS, PICTURE_SHARE = 4 << 20, 32
TRUNCATION = "truncate_prompt_tokens"

MAX_REASONS = 5


class SurveyWork(RowsTask):
    """A look at what a run would ask, between open and close; nothing is written."""

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

        first: so many of its first rows are shown; None for a dry run, for which rows that stand for all are answered
        and timed. max_rows: of more, every so manyth is looked at. reuse: as of Submission. arguments:
        reuse_from_any_model; answers, False for none; others as of RunSpec.from_arguments.
        """
        any_model, has_answers = arguments.pop("reuse_from_any_model", False), arguments.pop("answers", True)
        spec = RunSpec.from_arguments(input, arguments.pop("output", os.devnull), **arguments)
        if not kind_of(spec).is_tried:
            raise InvalidJob(
                "a preview or dry run looks at answers of one prompt a row: not at embeddings, lines of openai-batch "
                "files, or several prompts, of which you can name one"
            )
        spec.check_sampling(context.check_sampling)
        context.checks.admit(spec.repairs)
        storage = Storage.of(context)
        found = find_files(storage, spec.input, spec.output, spec.input_format)
        plan, schema = read_inputs(context, storage, spec, found)
        check_columns(spec, schema, found[0].path)
        if context.meter is None:
            raise InvalidJob("this process has no engine to count tokens with")
        meter, source = context.meter(), row_source(spec, context.check_sampling)
        ask = ask_of(plan, source, context)
        self._spec, self._counts = spec, (counts := _Counts(context, ask, meter, plan.rows))
        files = {shard.file for shard in plan.shards if shard.rows}
        with converted_for_now(storage, plan, files, context.shard_bytes.limit) as (storage_now, plan_now):
            if reuse:
                old = OldRuns(storage, reuse)
                places = match(context, storage_now, plan_now, (ask, source), old, any_model).places
                counts.is_reused = lambda row: bool(places[row] >= 0)
            for start, rows in rendered_shards(context, storage_now, plan_now, source):
                counts.add(start, rows, max_rows)
            slots = min(meter.max_num_seqs, MAX_BATCH)
            timed = pick_requests(counts.asked, slots) if first is None else []
            in_order = sorted(counts.asked, key=lambda each: each.row)[:first]
            tried = pick_requests(in_order, NUM_TRIED) if first is None else in_order
            wanted, texts, left = {each.row for each in (*timed, *tried)}, dict[int, Row](), MAX_PICKED_CHARS
            for start, rows in rendered_shards(context, storage_now, plan_now, source, wanted):
                for number, row in enumerate(rows, start):
                    if number in wanted and isinstance(row, Row):
                        left -= len(row.prompt) + row.picture_bytes // PICTURE_SHARE
                        if left >= 0:
                            texts[number] = row
        self._tried = picked = [(each, texts[each.row]) for each in tried if each.row in texts]
        rows_asked = [row for _, row in picked] if has_answers else []
        self._requests = ShardRequests(rows_asked, ask, lambda row: picked[row][0].row)
        self._num_tried, self._timing = 0, None
        if first is None:
            batch = [(each, texts[each.row]) for each in timed if each.row in texts]
            self._timing = _Timing(ask, spec.is_chat, batch, counts.num_requests)

    def requests(self) -> Iterator[Request]:
        for request in super().requests():
            self._num_tried += 1
            yield request
        if self._is_timed_next:
            assert self._timing is not None
            yield from self._timing.requests()

    @property
    def _is_timed_next(self) -> bool:
        """Whether all that was tried is answered, and batches are to be timed."""
        is_awaited = self._timing is not None and not self._timing.has_begun
        return is_awaited and self.asked.rows_done == self.asked.num_rows

    @property
    def has_more(self) -> bool:
        return super().has_more or self._is_timed_next

    @property
    def num_requests(self) -> int | None:
        return None if self._timing is not None else super().num_requests

    def inspect(self, index: int, completions: Sequence[Completion]) -> None:
        if index < self._num_tried:
            super().inspect(index, completions)

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        if index < self._num_tried:
            super().deliver(index, completions)
        elif self._timing is not None:
            self._timing.deliver(completions)

    def result(self) -> dict[str, Any]:
        answers = self.asked.answers()
        told = {**self._counts.told(), "num_tried": len(answers)}
        told["num_failed"] = sum(each.error is not None for each in answers)
        if self._timing is None:
            shown = zip(self._tried, answers or repeat(None), strict=False)  # none were wanted
            return {**told, "shown": [self._shown(*each, answer) for each, answer in shown]}
        generated = completion = again = 0.0
        weights = sum(asked.weight for asked, _ in self._tried)  # of all requests, or of those with room for their text
        scale = self._counts.scale * len(self._counts.asked) / (weights or 1.0)
        for place, tokens, answer in self.asked.answered:
            asked = self._tried[place][0]
            generated += asked.weight * tokens * scale
            completion += asked.weight * tokens * scale * asked.rows
            if answer.error is None and (answer.column("margin") or 0) < (self._spec.escalate_below or 0):
                again += asked.weight * scale * asked.rows
        seconds = self._timing.token_s * (self._counts.request_tokens * self._counts.scale + generated)
        told |= {"generated_tokens": generated, "completion_tokens": completion, "rows_escalated": again}
        return {**told, "seconds": seconds}

    def _shown(self, asked: Asked, row: Row, answer: Answer | None) -> dict[str, Any]:
        prompt: Any = json.loads(row.prompt) if self._spec.is_chat or row.pictures else row.prompt
        if not self._spec.is_chat:
            prompt = [{"role": "prompt", "content": prompt}]
        told: dict[str, Any] = {"row": asked.row, "prompt": prompt, "prompt_tokens": asked.tokens}
        if answer is None:
            return told
        reasons, texts = answer.finish_reason, answer.completion
        completions = list(zip(reasons, texts or (), strict=True)) if isinstance(reasons, tuple) else [(reasons, texts)]
        told |= {name: answer.column(name) for name in ("error", "label", "probabilities")}
        return {**told, "completions": completions, "tokens": answer.all_completion_tokens}


class Asked:
    """A request for `rows` rows from `row` on, which stands for `weight` such. tokens: of its prompt."""

    __slots__ = ("limit", "row", "rows", "tokens", "weight")

    def __init__(self, row: int, tokens: int, limit: int, rows: int) -> None:
        self.row, self.tokens, self.limit, self.rows, self.weight = row, tokens, limit, rows, 1.0


class _Counts:
    """Counts of a run's rows, of which every so manyth is looked at. is_reused: whether an earlier run has answered."""

    def __init__(self, context: JobContext, ask: Ask, meter: PromptMeter, total: int) -> None:
        self._context, self._ask, self._meter, self._total = context, ask, meter, total
        self.is_reused: Callable[[int], bool] = lambda row: False
        self.asked: list[Asked] = []
        self._known: dict[bytes, Asked] = {}
        self._reasons = Reasons()
        self._before: Sequence[int] = ()
        self._rows = self._repeated = self._reused = self._prompt_tokens = 0
        self.request_tokens = self.cached = 0

    @property
    def scale(self) -> float:
        return self._total / max(1, self._rows)

    @property
    def num_requests(self) -> int:
        return round(len(self.asked) * self.scale)

    def add(self, start: int, rows: Sequence[Row | RowProblem], max_rows: int | None) -> None:
        """Take the rows of a shard, the first of which has the number `start`: in the order in which they are asked."""
        every = 1 if max_rows is None else max(1, -(-self._total // max_rows))
        alike: dict[Row, list[int]] = {}
        for number, row in enumerate(rows, start):
            if number % every:
                continue
            self._rows += 1
            if self.is_reused(number):
                self._reused += 1
            elif isinstance(row, RowProblem):
                self._reasons.add(str(row), [number])
            else:
                alike.setdefault(row, []).append(number)
        for row in sorted(alike):
            self._context.check_interrupted()
            self._ask_for(row, alike[row])

    def _ask_for(self, row: Row, numbers: list[int]) -> None:
        """Count equal rows; those with equal answers are one request, in other shards too."""
        key, is_greedy = self._ask.key_of(row), self._ask.is_greedy(row)
        known = self._known.get(key)
        if known is not None and is_greedy:
            known.rows += len(numbers)
            self._repeated += len(numbers)
            self._prompt_tokens += len(numbers) * known.tokens
            return
        (request,) = self._ask.begin(row, numbers[0]).requests
        most = request.sampling.get(TRUNCATION)
        options = {**request.chat_options, **({} if most is None else {TRUNCATION: most})}
        try:
            token_ids = self._meter.token_ids(request.prompt, request.messages, options)
        except InvalidJob as error:
            self._reasons.add(str(error), numbers)
            return
        self._repeated += len(numbers) - (known is None)
        limit = row.own_sampling.get("max_tokens", 0)
        for each in [numbers] if is_greedy else [[number] for number in numbers]:
            asked = Asked(each[0], len(token_ids), limit, len(each))
            self.asked.append(asked)
            self._known.setdefault(key, asked)
            self._prompt_tokens += len(each) * len(token_ids)
            self.request_tokens += len(token_ids)
            self.cached += _shared(self._before, token_ids, self._meter.block_size)
            self._before = token_ids

    def told(self) -> dict[str, Any]:
        counted = {
            "rows_failing": self._reasons.rows,
            "rows_reused": self._reused,
            "requests": len(self.asked),
            "rows_repeated": self._repeated,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self.cached,
        }
        reasons = [vars(each) for each in self._reasons.commonest(MAX_REASONS)]
        told = {name: count * self.scale for name, count in counted.items()}
        return {"num_rows": self._total, "rows_read": self._rows, "reasons": reasons, **told}


class _Timing:
    """Full batches of a run's rows, each with another beginning, so that nothing is cached. most: requests."""

    def __init__(self, ask: Ask, is_chat: bool, batch: Sequence[tuple[Asked, Row]], most: int) -> None:
        self._ask, self._is_chat, self._batch, self._most = ask, is_chat, batch, most
        self.has_begun = False
        self._began_at = self._ended_at = 0.0
        self._tokens = 0

    def requests(self) -> Iterator[Request]:
        self.has_begun, self._began_at = True, time.monotonic()
        for count, (asked, row) in zip(range(self._most), cycle(self._batch), strict=False):
            if count % len(self._batch) == 0:
                if count and time.monotonic() - self._began_at > TIMED_S:
                    return
                beginning = token_hex(2)
            (request,) = self._ask.begin(self._begun(row, beginning), asked.row).requests
            self._tokens += asked.tokens
            yield request

    def deliver(self, completions: Sequence[Completion]) -> None:
        self._tokens += sum(len(each.token_ids) for each in completions)
        self._ended_at = time.monotonic()

    @property
    def token_s(self) -> float:
        """Seconds that a token takes, of prompts and answers as they are in this run, where beginnings are shared."""
        return (self._ended_at - self._began_at) / max(1, self._tokens)

    def _begun(self, row: Row, beginning: str) -> Row:
        if row.pictures and not self._is_chat:
            return row._replace(prompt=json.dumps([{"type": "text", "text": beginning}, *json.loads(row.prompt)]))
        if not self._is_chat:
            return row._replace(prompt=beginning + row.prompt)
        first, *others = json.loads(row.prompt)
        content = first.get("content") or ""
        parts = [{"type": "text", "text": beginning}, *content] if isinstance(content, list) else beginning + content
        return row._replace(prompt=json.dumps([{**first, "content": parts}, *others]))


def pick_requests(requests: Sequence[Asked], count: int) -> list[Asked]:
    """Choose at most `count` requests, large ones likelier, and note for how many each stands."""
    order = sorted(requests, key=lambda each: (each.limit, each.tokens, each.row))
    if len(order) <= count:
        return order
    sizes_of = [(each.tokens, each.limit, each.rows) for each in order]
    tokens, limit, rows = (sum(column) / len(order) or 1.0 for column in zip(*sizes_of, strict=True))
    sizes = [1 + each.tokens / tokens + each.limit / limit + each.rows / rows for each in order]
    step, passed, taken, picks = math.fsum(sizes) / count, 0.0, 0, []
    for each, size in zip(order, sizes, strict=True):
        passed += size
        if times := math.floor(passed / step + 0.5) - taken:
            each.weight = times * step / size
            picks.append(each)
            taken += times
    return picks


def _shared(before: Sequence[int], token_ids: Sequence[int], block_size: int) -> int:
    """Return how many tokens of a prompt the one before leaves in the prefix cache; the last is computed."""
    shared = 0
    while (end := shared + block_size) < len(token_ids) and before[shared:end] == token_ids[shared:end]:
        shared = end
    return shared
