"""What a run would ask, without asking it: tokens, duplicates, shared prefixes, rows that would fail."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence, Set
from hashlib import blake2b
from typing import Any

from jobs.context import JobContext
from jobs.context.served_model import PromptMeter
from jobs.errors import InvalidJob
from jobs.parquet.asks.ask import row_seed
from jobs.parquet.asks.kinds import ask_of
from jobs.parquet.asks.labels import content_free
from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converted_inputs import converted_for_now
from jobs.parquet.planning.find_files import find_files
from jobs.parquet.planning.inputs import read_inputs
from jobs.parquet.planning.planner import check_columns, new_plan
from jobs.parquet.planning.reusing import match
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.reuse.old_runs import OldRuns
from jobs.parquet.shards.shard_texts import rendered_shards
from jobs.parquet.tables.row_values import RowProblem
from jobs.runs.plans.embedding_options import EMBED
from jobs.runs.plans.formats import OPENAI_BATCH
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec
from jobs.runs.statistics.reasons import Reasons

#: Of the prompts that are returned, in characters: a result of the worker's has its limit.
MAX_PICKED_CHARS = 4 << 20

#: The sampling value that shortens a prompt.
TRUNCATION = "truncate_prompt_tokens"

#: Kinds of errors that are told.
MAX_REASONS = 5


def survey_parquet(
    context: JobContext,
    input: str | list[str],
    output: str = os.devnull,
    pick: int = 64,
    first: bool = False,
    max_rows: int | None = None,
    reuse: Sequence[str] = (),
    reuse_from_any_model: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """Look at what a run of these arguments would ask; write nothing.

    pick: so many of its requests are returned, chosen to stand for all; with `first`, the first rows. max_rows: where
    the run has more, every so manyth of them is looked at. reuse: see Submission. arguments: as of
    RunSpec.from_arguments.
    Raises RunError or InvalidJob.
    """
    spec = RunSpec.from_arguments(input, output, **arguments)
    if spec.input_format == OPENAI_BATCH:
        raise InvalidJob("the lines of an openai-batch file say what they ask: there is nothing to preview")
    if spec.task == EMBED:
        raise InvalidJob("a preview or dry run shows what is generated, and for embeddings nothing is")
    if spec.prompts is not None:
        raise InvalidJob(
            "a preview or dry run looks at one prompt of a row, as later ones are made of answers: name one"
        )
    spec.check_sampling(context.check_sampling)
    storage = Storage.of(context)
    found = find_files(storage, spec.input, spec.output, spec.input_format)
    inputs = read_inputs(context, storage, spec, found)
    check_columns(spec, inputs.schema, found[0].path)
    if context.meter is None:
        raise InvalidJob("this process has no engine to count tokens with")
    plan = new_plan(context, spec, inputs)
    files = {shard.file for shard in plan.shards if shard.rows}
    with converted_for_now(storage, plan, files, context.shard_bytes.limit) as (own_storage, own_plan):
        survey = _Survey(context, own_storage, own_plan, context.meter())
        if reuse:
            survey.leave_out(OldRuns(storage, reuse), reuse_from_any_model)
        return survey.take(pick, first, max_rows)


class _Survey:
    def __init__(self, context: JobContext, storage: Storage, plan: Plan, meter: PromptMeter) -> None:
        self._context, self._storage, self._plan, self._meter = context, storage, plan, meter
        self._source = row_source(plan.spec, context.check_sampling)
        self._sampling, self._chat = plan.spec.chat
        self._requests: list[Asked] = []
        self._known: dict[bytes, int] = {}
        self._reasons = Reasons()
        self._before: Sequence[int] = ()
        self._tokens = self._repeated = self._rows = self._cached = self._rows_reused = 0
        self._is_reused: Callable[[int], bool] = lambda row: False

    def leave_out(self, old: OldRuns, any_model: bool) -> None:
        """Ask no rows that earlier runs have answered."""
        asks = ask_of(self._plan, self._source, self._context), self._source
        places = match(self._context, self._storage, self._plan, asks, old, any_model).places
        self._is_reused = lambda row: bool(places[row] >= 0)

    def take(self, pick: int, first: bool, max_rows: int | None) -> dict[str, Any]:
        every = 1 if max_rows is None else max(1, -(-self._plan.rows // max(1, max_rows)))
        for start, rows in self._rendered(None):
            looked_at = {start + number: row for number, row in enumerate(rows) if (start + number) % every == 0}
            self._look_at(looked_at)
        if first:
            picks = [(each, 1.0) for each in sorted(self._requests, key=lambda each: each.row)[:pick]]
        else:
            picks = pick_requests(self._requests, pick)
        return {
            "rows": self._plan.rows,
            "rows_read": self._rows,
            "rows_failing": self._reasons.rows,
            "reasons": [
                {"rows": each.rows, "row": each.examples[0], "reason": each.text}
                for each in self._reasons.commonest(MAX_REASONS)
            ],
            "rows_repeated": self._repeated,
            "rows_reused": self._rows_reused,
            "requests": len(self._requests),
            "prompt_tokens": self._tokens,
            "request_tokens": sum(each.tokens for each in self._requests),
            "cached_tokens": self._cached,
            "n": self._plan.spec.n,
            "max_num_seqs": self._meter.max_num_seqs,
            "block_size": self._meter.block_size,
            "num_blocks": self._meter.num_blocks,
            "model": self._context.model.name,
            "labels": self._plan.spec.labels,
            "calibrate": self._prior(),
            "picked": self._picked(picks),
        }

    def _look_at(self, rows: dict[int, Row | RowProblem]) -> None:
        """Take rows of one shard: their prompts are computed in the order of their texts."""
        asked: dict[Row, list[int]] = {}
        for number, row in rows.items():
            self._rows += 1
            if self._is_reused(number):
                self._rows_reused += 1
            elif isinstance(row, RowProblem):
                self._reasons.add(str(row), [number])
            else:
                asked.setdefault(row, []).append(number)
        for row in sorted(asked):
            self._context.check_interrupted()
            self._ask(row, asked[row])

    def _ask(self, row: Row, rows: list[int]) -> None:
        own = row.own_sampling
        sampling = {**self._sampling, **own}
        is_greedy = sampling.get("temperature") == 0 or self._plan.spec.labels is not None
        key = blake2b("\n".join(row).encode(), digest_size=16).digest()
        known = self._known.get(key)
        if known is not None and self._requests[known].is_greedy:
            self._requests[known].rows += len(rows)
            self._repeated += len(rows)
            self._tokens += len(rows) * self._requests[known].tokens
            return
        try:
            token_ids = self._token_ids(row.prompt, sampling.get(TRUNCATION))
        except InvalidJob as error:
            self._reasons.add(str(error), rows)
            return
        self._repeated += len(rows) - (known is None)
        self._tokens += len(rows) * len(token_ids)
        self._known.setdefault(key, len(self._requests))
        limit = own.get("max_tokens", 0)
        for numbers in [rows] if is_greedy else [[row] for row in rows]:
            self._cached += _shared(self._before, token_ids, self._meter.block_size)
            self._before = token_ids
            self._requests.append(Asked(numbers[0], len(token_ids), limit, len(numbers), is_greedy))

    def _token_ids(self, prompt: str, most: int | None) -> Sequence[int]:
        options = {} if most is None else {TRUNCATION: most}
        if self._plan.spec.is_chat:
            return self._meter.token_ids(None, json.loads(prompt), {**self._chat.template, **options})
        return self._meter.token_ids(prompt, None, options)

    def _picked(self, picks: Sequence[tuple[Asked, float]]) -> list[dict[str, Any]]:
        """Read the prompts of what was picked again; those beyond MAX_PICKED_CHARS are left out."""
        wanted = {asked.row: (asked, weight) for asked, weight in picks}
        found: dict[int, dict[str, Any]] = {}
        left = MAX_PICKED_CHARS
        for start, rows in self._rendered(wanted.keys()):
            for number in wanted.keys() & set(range(start, start + len(rows))):
                row = rows[number - start]
                if isinstance(row, Row) and (left := left - len(row.prompt)) >= 0:
                    found[number] = self._told(row, *wanted[number])
        return [found[row] for row in wanted if row in found]

    def _told(self, row: Row, asked: Asked, weight: float) -> dict[str, Any]:
        prompt, own = row.prompt, row.own_sampling
        sampling = {**self._plan.spec.sampling, **own}
        if "seed" in self._plan.spec.sampling and "seed" not in own:
            sampling["seed"] = row_seed(self._plan.seed, asked.row)
        return {
            "row": asked.row,
            "prompt": json.loads(prompt) if self._plan.spec.is_chat else prompt,
            "is_chat": self._plan.spec.is_chat,
            "sampling": sampling,
            "prompt_tokens": asked.tokens,
            "rows": asked.rows,
            "weight": weight,
        }

    def _prior(self) -> Any:
        """Return the prompt, or the messages, that labels are calibrated with."""
        if not self._plan.spec.calibrate:
            return False
        text = content_free(self._plan.spec, self._source).prompt
        return json.loads(text) if self._plan.spec.is_chat else text

    def _rendered(self, only: Set[int] | None) -> Iterator[tuple[int, list[Row | RowProblem]]]:
        return rendered_shards(self._context, self._storage, self._plan, self._source, only)


class Asked:
    """A request of a run, for `rows` rows from `row` on, counted over all files. limit: max_tokens, 0 where all are
    alike."""

    __slots__ = ("is_greedy", "limit", "row", "rows", "tokens")

    def __init__(self, row: int, tokens: int, limit: int, rows: int, is_greedy: bool) -> None:
        self.row, self.tokens, self.limit, self.rows, self.is_greedy = row, tokens, limit, rows, is_greedy


def pick_requests(requests: Sequence[Asked], count: int) -> list[tuple[Asked, float]]:
    """Choose at most `count` requests, large ones likelier, and tell for how many each stands."""
    order = sorted(requests, key=lambda each: (each.limit, each.tokens, each.row))
    if len(order) <= count:
        return [(each, 1.0) for each in order]
    sizes_of = [(each.tokens, each.limit, each.rows) for each in order]
    tokens, limit, rows = (sum(column) / len(order) or 1.0 for column in zip(*sizes_of, strict=True))
    sizes = [1 + each.tokens / tokens + each.limit / limit + each.rows / rows for each in order]
    step, passed, taken, picks = math.fsum(sizes) / count, 0.0, 0, []
    for each, size in zip(order, sizes, strict=True):
        passed += size
        if times := math.floor(passed / step + 0.5) - taken:
            picks.append((each, times * step / size))
            taken += times
    return picks


def _shared(before: Sequence[int], token_ids: Sequence[int], block_size: int) -> int:
    """Return how many tokens of a prompt the one before leaves in the prefix cache; the last is computed."""
    shared = 0
    while (end := shared + block_size) < len(token_ids) and before[shared:end] == token_ids[shared:end]:
        shared = end
    return shared
