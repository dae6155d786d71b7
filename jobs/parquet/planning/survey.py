"""A look at a run before it is one: all prompts are counted, some are answered, and a batch of these is timed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
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
from jobs.parquet.planning.find_files import find_files
from jobs.parquet.planning.inputs import read_inputs
from jobs.parquet.planning.own_rows import match, with_seed_of
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.reuse.old_runs import OldRuns
from jobs.parquet.shards.row_items import row_runner
from jobs.parquet.shards.rows_task import RowsTask
from jobs.parquet.shards.shard_texts import rendered_shards
from jobs.parquet.tables.columns import RowProblem
from jobs.prompts.template_texts import as_shown
from jobs.runs.plans.spec import RunSpec
from jobs.runs.statistics.run_statistics import Reasons
from jobs.tasks import Completion, Request

#: Requests that a dry run has answered: a full batch of the worker's, within these.
MIN_TRIED, MAX_TRIED = 64, 256
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
        and timed. max_rows: of a larger run about so many are looked at, evenly. reuse: as of Submission. arguments:
        reuse_from_any_model; answers, False for none; others as of RunSpec.from_arguments.
        """
        any_model, has_answers = arguments.pop("reuse_from_any_model", False), arguments.pop("answers", True)
        self._spec = spec = RunSpec.from_arguments(input, arguments.pop("output", os.devnull), **arguments)
        if not kind_of(spec).is_tried:
            raise InvalidJob(
                "a preview or dry run looks at answers of one prompt a row: not at embeddings, lines of openai-batch "
                "files, or several prompts, of which you can name one"
            )
        spec.check_sampling(context.check_sampling)
        spec.admit(context.checks)
        storage = Storage.of(context)
        found = find_files(storage, spec.input, spec.output, spec.input_format)
        plan = read_inputs(context, storage, spec, found)
        if context.meter is None:
            raise InvalidJob("this process has no engine to count tokens with")
        old = OldRuns(storage, reuse, plan) if reuse else None
        plan = plan if old is None else with_seed_of(plan, old)
        meter, ask = context.meter(), ask_of(plan, context)
        self._counts = counts = _Counts(context, ask, meter, plan.rows, max_rows)
        files = {shard.file for shard in plan.shards if shard.rows}
        with converted_for_now(storage, plan, files) as (storage, plan):
            is_reused = np.zeros(plan.rows, bool)
            if old is not None:
                is_reused = match(context, storage, plan, ask, old, any_model).places >= 0
            for start, rows in rendered_shards(context, storage, plan, ask.source):
                counts.add(start, rows, is_reused)
            chosen = sorted(counts.asked, key=lambda each: each.row)[:first]
            if first is None:
                chosen = pick_requests(chosen, max(MIN_TRIED, min(meter.max_num_seqs, MAX_TRIED)))
            wanted, texts, left = {each.row for each in chosen}, dict[int, Row](), MAX_PICKED_CHARS
            for start, rows in rendered_shards(context, storage, plan, ask.source, wanted):
                for number, row in enumerate(rows, start):
                    if number in wanted and isinstance(row, Row):
                        left -= len(row.prompt) + row.picture_bytes // PICTURE_SHARE
                        if left >= 0:
                            texts[number] = row
        self._tried = tried = [(each, texts[each.row]) for each in chosen if each.row in texts]
        rows_asked = [row for _, row in tried] if has_answers else []
        self.runner = row_runner(rows_asked, ask, context.checks, lambda row: tried[row][0].row)
        self._sent, self._is_dry = list[Request](), first is None
        self._began_at = self._seconds = self._timed_tokens = 0.0

    def requests(self) -> Iterator[Request]:
        """Yield what the rows ask; in a dry run then the same once more, behind a text that no cache has yet."""
        for request in super().requests():
            self._sent.append(request)
            yield request
        if self._is_timed_next:
            self._began_at, beginning = time.monotonic(), token_hex(2)
            yield from (_begun(request, beginning) for request in self._sent)

    @property
    def _is_timed_next(self) -> bool:
        return self._is_dry and not self._began_at and self.asked.counts.done == self.asked.num_places

    @property
    def has_more(self) -> bool:
        return super().has_more or self._is_timed_next

    @property
    def num_requests(self) -> int | None:
        return None if self._is_dry else super().num_requests

    def inspect(self, index: int, completions: Sequence[Completion]) -> None:
        if index < len(self._sent):
            super().inspect(index, completions)

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        if index < len(self._sent):
            super().deliver(index, completions)
            return
        self._timed_tokens += completions[0].num_prompt_tokens + sum(len(each.token_ids) for each in completions)
        self._seconds = time.monotonic() - self._began_at

    def result(self) -> dict[str, Any]:
        counts, answers = self._counts, self.asked.answers()
        told = {**counts.told(), "num_tried": len(answers)}
        told["num_failed"] = sum(each.error is not None for each in answers)
        if not self._is_dry:
            shown = zip(self._tried, answers or repeat(None), strict=False)  # none were wanted
            return {**told, "shown": [self._shown(*each, answer) for each, answer in shown]}
        weights = sum(asked.weight for asked, _ in self._tried)  # of all requests, or of those with room for their text
        scale = counts.scale * len(counts.asked) / (weights or 1.0)
        found = [(self._tried[row.place][0], row.num_tokens * scale, row.answer) for row in self.asked.answered]
        generated = sum(asked.weight * tokens for asked, tokens, _ in found)
        completion = sum(asked.weight * tokens * asked.rows for asked, tokens, _ in found)
        low = self._spec.escalate_below or 0
        again = sum(
            asked.weight * asked.rows * scale
            for asked, _, answer in found
            if answer.error is None and (answer.column("margin") or 0) < low
        )
        seconds = self._seconds / max(1, self._timed_tokens) * (counts.request_tokens * counts.scale + generated)
        told |= {"generated_tokens": generated, "completion_tokens": completion, "rows_escalated": again}
        return {**told, "seconds": seconds}

    def _shown(self, asked: Asked, row: Row, answer: Answer | None) -> dict[str, Any]:
        prompt: Any = json.loads(row.prompt) if self._spec.is_chat or row.pictures else as_shown(row.prompt)
        if not self._spec.is_chat:
            prompt = [{"role": "prompt", "content": prompt}]
        told: dict[str, Any] = {"row": asked.row, "prompt": prompt, "prompt_tokens": asked.tokens}
        if "tools" in row.own_sampling:
            told["tools"] = row.own_sampling["tools"]
        if answer is None:
            return told
        reasons, texts = answer.finish_reason, answer.completion
        completions = list(zip(reasons, texts or (), strict=True)) if isinstance(reasons, tuple) else [(reasons, texts)]
        told |= {name: answer.column(name) for name in ("error", "label", "probabilities")}
        calls = answer.tool_calls if isinstance(answer.tool_calls, tuple) else (answer.tool_calls,)
        told["tool_calls"] = [each for each in calls if each is not None]
        return {**told, "completions": completions, "tokens": answer.all_completion_tokens}


@dataclass(slots=True)
class Asked:
    """A request for `rows` rows from `row` on, which stands for `weight` such. tokens: of its prompt."""

    row: int
    tokens: int
    limit: int
    rows: int
    weight: float = 1.0


class _Counts:
    """Counts of a run's rows: of `total`, every so manyth is looked at, at most `max_rows`."""

    def __init__(self, context: JobContext, ask: RowAsk, meter: PromptMeter, total: int, max_rows: int | None) -> None:
        self._context, self._ask, self._meter, self._total = context, ask, meter, total
        self._every = max(1, -(-total // (max_rows or max(1, total))))
        self.asked: list[Asked] = []
        self._known: dict[bytes, Asked] = {}
        self._found = dict.fromkeys(("rows_reused", "rows_repeated", "prompt_tokens", "cached_tokens"), 0)
        self._reasons = Reasons()
        self._before: Sequence[int] = ()
        self._rows = self.request_tokens = 0

    @property
    def scale(self) -> float:
        return self._total / max(1, self._rows)

    def add(self, start: int, rows: Sequence[Row | RowProblem], is_reused: npt.NDArray[np.bool_]) -> None:
        """Take the rows of a shard, the first of which has the number `start`: in the order in which they are asked."""
        alike: dict[Row, list[int]] = {}
        for number in range(start + -start % self._every, start + len(rows), self._every):
            row = rows[number - start]
            self._rows += 1
            if is_reused[number]:
                self._found["rows_reused"] += 1
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
            tokens = known.tokens
        else:
            (request,) = map(self._ask.prepared, self._ask.begin(row, numbers[0]).send(None))  # type: ignore[arg-type]
            most = request.sampling.get(TRUNCATION)
            options = {**request.chat_options, **({} if most is None else {TRUNCATION: most})}
            try:
                token_ids = self._meter.token_ids(request.prompt, request.messages, options)
            except InvalidJob as error:
                self._reasons.add(str(error), numbers)
                return
            tokens, limit = len(token_ids), row.own_sampling.get("max_tokens", 0)
            for each in [numbers] if is_greedy else [[number] for number in numbers]:
                self.asked.append(Asked(each[0], tokens, limit, len(each)))
                self._known.setdefault(key, self.asked[-1])
                self.request_tokens += tokens
                self._found["cached_tokens"] += _shared(self._before, token_ids, self._meter.block_size)
                self._before = token_ids
        self._found["rows_repeated"] += len(numbers) - (known is None)
        self._found["prompt_tokens"] += len(numbers) * tokens

    def told(self) -> dict[str, Any]:
        found = {**self._found, "rows_failing": self._reasons.rows, "requests": len(self.asked)}
        reasons = [vars(each) for each in self._reasons.commonest(MAX_REASONS)]
        told = {"num_rows": self._total, "rows_read": self._rows, "reasons": reasons}
        return told | {name: count * self.scale for name, count in found.items()}


def _begun(request: Request, beginning: str) -> Request:
    if request.messages is None:
        return replace(request, prompt=_behind(beginning, request.prompt))
    first, *others = request.messages
    return replace(request, messages=[{**first, "content": _behind(beginning, first.get("content") or "")}, *others])


def _behind(beginning: str, content: Any) -> Any:
    return beginning + content if isinstance(content, str) else [{"type": "text", "text": beginning}, *content]


def pick_requests(requests: Sequence[Asked], count: int) -> list[Asked]:
    """Choose at most `count` requests, large ones likelier, and note for how many each stands."""
    order = sorted(requests, key=lambda each: (each.limit, each.tokens, each.row))
    if len(order) <= count:
        return order
    columns = np.array([(1, each.tokens, each.limit, each.rows) for each in order], np.float64)
    sizes = (columns / np.maximum(columns.mean(axis=0), 1e-9)).sum(axis=1)
    sizes *= count / sizes.sum()
    times = np.diff(np.floor(np.cumsum(sizes) + 0.5), prepend=0)
    for place in np.flatnonzero(times):
        order[place].weight = float(times[place] / sizes[place])
    return [order[place] for place in np.flatnonzero(times)]


def _shared(before: Sequence[int], token_ids: Sequence[int], block_size: int) -> int:
    """Return how many tokens of a prompt the one before leaves in the prefix cache; the last is computed."""
    shared = 0
    while (end := shared + block_size) < len(token_ids) and before[shared:end] == token_ids[shared:end]:
        shared = end
    return shared
