"""What a whole run takes, estimated from a few of its rows. Pure functions of numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import fsum, sqrt

#: Rows whose turns in the batch are gone through one by one.
MAX_PLAYED = 20_000

#: Half the width of a 95 % interval, in standard errors.
WIDTH = 1.96


@dataclass(frozen=True)
class Sized:
    """A request of a run before it is answered. tokens: of its prompt. limit: its row's max_tokens, 0 where
    rows do not differ in it. rows: that its answer is for."""

    tokens: int
    limit: int
    rows: int


@dataclass(frozen=True)
class Pick:
    """A request that is tried. number: its place among all. weight: how many it stands for."""

    number: int
    weight: float


@dataclass(frozen=True)
class Total:
    """A sum over a run, with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Total:
        return Total(self.value * factor, self.low * factor, self.high * factor)


def pick_requests(requests: Sequence[Sized], count: int) -> list[Pick]:
    """Choose requests that stand for all, in order of their size.

    Large ones are likelier to be chosen, by as much as prompt, limit and rows are above the average, and
    count for fewer: what a few rows of a skewed file hold is seen. No chance is drawn. At most `count`.
    """
    chances = _chances(requests)
    order = sorted(range(len(requests)), key=lambda i: (requests[i].limit, requests[i].tokens, i))
    certain: set[int] = set()
    while True:  # what would be chosen more than once is chosen, and the others anew
        rest = [i for i in order if i not in certain]
        left = fsum(chances[i] for i in rest)
        more = {i for i in rest if chances[i] * (count - len(certain)) >= left}
        if not more or len(certain) + len(more) > count:
            break
        certain |= more
    picks = [Pick(i, 1.0) for i in certain]
    if rest and (free := count - len(certain)) > 0:
        step, passed, wanted = left / free, 0.0, left / free / 2
        for i in rest:
            passed += chances[i]
            while passed > wanted and wanted < left:
                picks.append(Pick(i, step / chances[i]))
                wanted += step
    place = {i: number for number, i in enumerate(order)}
    return sorted(picks, key=lambda pick: place[pick.number])


def _chances(requests: Sequence[Sized]) -> list[float]:
    count = max(1, len(requests))
    tokens = fsum(each.tokens for each in requests) / count or 1.0
    limit = fsum(each.limit for each in requests) / count or 1.0
    rows = fsum(each.rows for each in requests) / count or 1.0
    return [1 + each.tokens / tokens + each.limit / limit + each.rows / rows for each in requests]


def total(picks: Sequence[Pick], values: Sequence[float]) -> Total:
    """Return the sum over all requests of what `values` say of the picked ones.

    The interval comes from how much neighbours in size differ; what was certain to be picked adds nothing.
    """
    parts = [pick.weight * value for pick, value in zip(picks, values, strict=True)]
    drawn = [part for pick, part in zip(picks, parts, strict=True) if pick.weight > 1.0]
    value = fsum(parts)
    if len(drawn) < 2:
        return Total(value, value, value)
    differences = fsum((one - other) ** 2 for one, other in pairwise(drawn))
    error = WIDTH * sqrt(differences * len(drawn) / (2 * (len(drawn) - 1)))
    return Total(value, max(0.0, value - error), value + error)


@dataclass(frozen=True)
class Row:
    """One completion in a batch. steps: that decode it, which are one fewer than its tokens, as its prompt
    gives the first. blocks: of the KV pool, that it comes to hold."""

    steps: int
    blocks: int = 1


@dataclass(frozen=True)
class Batch:
    """What a worker's batch holds at a time. max_num_seqs: rows. num_blocks: of the KV pool."""

    max_num_seqs: int
    num_blocks: int

    def begins(self, rows: Sequence[Row]) -> list[int]:
        """Return the step in which each row begins, admitted in this order, each as soon as it fits."""
        running: list[tuple[int, int]] = []
        free, step, begins = self.num_blocks, 0, []
        for row in rows:
            while running and (len(running) >= self.max_num_seqs or free < row.blocks):
                step, blocks = heappop(running)
                free += blocks
            begins.append(step)
            free -= row.blocks
            heappush(running, (step + row.steps, row.blocks))
        return begins


@dataclass(frozen=True)
class Speed:
    """What a worker takes, in seconds: for a token of a prompt, a decode step, each row in such a step.

    error: by which part of it a sum of these may be off, as far as the measuring tells.
    """

    prompt_token_s: float
    step_s: float
    row_s: float
    error: float = 0.0

    def seconds(self, prompt_tokens: float, turns: float, steps: float) -> float:
        """Return what a run takes. prompt_tokens: not of the cache. steps: in which rows are decoded. turns:
        of rows in these."""
        return prompt_tokens * self.prompt_token_s + turns * self.row_s + steps * self.step_s


def num_steps(picks: Sequence[Pick], tried: Sequence[Row], rows: int, batch: Batch) -> float:
    """Return in how many steps so many rows are decoded, each admitted as it fits.

    The rows are as the picked ones, each as often as it stands for others, in a mixed order. Of more than
    MAX_PLAYED the rest go as those in the middle: at the end of a run the batch is not full.
    """
    weight = fsum(pick.weight for pick in picks)
    if not picks or rows == 0:
        return 0.0
    count = min(rows, max(MAX_PLAYED, 4 * batch.max_num_seqs))
    played, passed, numbered = [], 0.0, iter(zip(picks, tried, strict=True))
    row = Row(0)
    for number in range(count):
        while passed <= (number + 0.5) * weight / count and (following := next(numbered, None)) is not None:
            passed, row = passed + following[0].weight, following[1]
        played.append(row)
    random.Random(0).shuffle(played)
    begins = batch.begins(played)
    whole = max(begin + each.steps for begin, each in zip(begins, played, strict=True))
    middle = begins[3 * count // 4] - begins[count // 4]
    return whole + (rows - count) * middle / max(1, 3 * count // 4 - count // 4)


@dataclass(frozen=True)
class Together:
    """Rows that were answered together. first_s: seconds until all had their first token. ends_s: until each
    of them ended."""

    rows: Sequence[Row]
    first_s: float
    ends_s: Sequence[float]


def measured_speed(prompts: Sequence[tuple[float, float]], groups: Sequence[Together], batch: Batch) -> Speed:
    """Return a worker's speed.

    prompts: measurements of what prompts alone take, as seconds and tokens. groups: of rows. A row ends after
    so many steps, and all others of its group have had their turns in these. Groups of unlike sizes, and rows
    of unlike lengths, tell what a step takes from what a row takes.
    """
    prompt_token_s = _ratio(fsum(seconds for seconds, _ in prompts), fsum(tokens for _, tokens in prompts))
    each = [ended for group in groups for ended in _ended(group, batch)]
    step_s, row_s = _least_squares(each)
    seconds = fsum(seconds for *_, seconds in each)
    misfit = fsum(abs(taken - steps * step_s - turns * row_s) for steps, turns, taken in each)
    prompts_misfit = fsum(abs(seconds - tokens * prompt_token_s) for seconds, tokens in prompts)
    prompts_s = fsum(seconds for seconds, _ in prompts)
    return Speed(
        prompt_token_s, step_s, row_s, max(_ratio(misfit, seconds), _ratio(prompts_misfit, prompts_s))
    )


def _ended(group: Together, batch: Batch) -> list[tuple[float, float, float]]:
    """Return for each row in which step it ended, how many turns all rows had had, and after how long."""
    begins = batch.begins(group.rows)
    found = []
    for begin, row, end_s in zip(begins, group.rows, group.ends_s, strict=True):
        step = begin + row.steps
        turns = sum(
            min(other.steps, max(0, step - first)) for first, other in zip(begins, group.rows, strict=True)
        )
        found.append((float(step), float(turns), max(0.0, end_s - group.first_s)))
    return found


def _least_squares(each: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return what a step and what a row take, neither of them less than nothing."""
    a = fsum(steps * steps for steps, _, _ in each)
    b = fsum(steps * turns for steps, turns, _ in each)
    c = fsum(turns * turns for _, turns, _ in each)
    p = fsum(steps * seconds for steps, _, seconds in each)
    q = fsum(turns * seconds for _, turns, seconds in each)
    determinant = a * c - b * b
    if determinant > 1e-9 * a * c:
        step_s, row_s = (p * c - q * b) / determinant, (q * a - p * b) / determinant
        if step_s >= 0 and row_s >= 0:
            return step_s, row_s
    alone_step, alone_row = _ratio(p, a), _ratio(q, c)
    misfit_step = fsum((seconds - alone_step * steps) ** 2 for steps, _, seconds in each)
    misfit_row = fsum((seconds - alone_row * turns) ** 2 for _, turns, seconds in each)
    return (alone_step, 0.0) if misfit_step < misfit_row else (0.0, alone_row)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
