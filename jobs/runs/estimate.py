"""What a whole run takes, estimated from a few of its rows. Pure functions of numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
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
class Speed:
    """What a worker takes, in seconds: for a token of a prompt, a decode step, each row in such a step."""

    prompt_token_s: float
    step_s: float
    row_s: float

    def seconds(self, prompt_tokens: float, completion_tokens: float, steps: float) -> float:
        """Return what a run takes. prompt_tokens: not of the cache. steps: in which rows are decoded."""
        return prompt_tokens * self.prompt_token_s + completion_tokens * self.row_s + steps * self.step_s


def num_steps(picks: Sequence[Pick], lengths: Sequence[int], rows: int, batch: int) -> float:
    """Return in how many steps so many rows are decoded, `batch` at a time, each place taken as it is free.

    The rows have the lengths of the picked ones, each as often as it stands for others, in a mixed order. Of
    more than MAX_PLAYED the rest fill the batch: only the end of a run does not.
    """
    weight = fsum(pick.weight for pick in picks)
    if not picks or rows == 0:
        return 0.0
    count = min(rows, max(MAX_PLAYED, 4 * batch))
    played, passed, numbered = [], 0.0, iter(zip(picks, lengths, strict=True))
    length = 0
    for number in range(count):
        while passed <= (number + 0.5) * weight / count and (following := next(numbered, None)) is not None:
            passed, length = passed + following[0].weight, following[1]
        played.append(length)
    random.Random(0).shuffle(played)
    free = [0] * min(batch, count)
    for each in played:
        heapreplace(free, free[0] + each)
    return max(free) + (rows - count) * fsum(played) / count / batch


@dataclass(frozen=True)
class Together:
    """Rows that were answered together. ends_s: seconds after the first began. lengths: tokens of each row.
    prompt_tokens: that all of them had computed."""

    prompt_tokens: float
    ends_s: Sequence[float]
    lengths: Sequence[int]


def measured_speed(prompt_token_s: float, groups: Sequence[Together]) -> Speed:
    """Return a worker's speed from groups of rows.

    After as many steps as a row has tokens it ends; all others of its group have had that many turns, or
    ended. Groups of unlike sizes, and rows of unlike lengths, tell what a step takes from what a row takes.
    """
    each = [
        (
            float(length),
            float(sum(min(length, other) for other in group.lengths)),
            max(0.0, end_s - prompt_token_s * group.prompt_tokens),
        )
        for group in groups
        for end_s, length in zip(group.ends_s, group.lengths, strict=True)
    ]
    a = fsum(steps * steps for steps, _, _ in each)
    b = fsum(steps * turns for steps, turns, _ in each)
    c = fsum(turns * turns for _, turns, _ in each)
    p = fsum(steps * seconds for steps, _, seconds in each)
    q = fsum(turns * seconds for _, turns, seconds in each)
    determinant = a * c - b * b
    if determinant > 1e-9 * a * c:
        step_s, row_s = (p * c - q * b) / determinant, (q * a - p * b) / determinant
        if step_s >= 0 and row_s >= 0:
            return Speed(prompt_token_s, step_s, row_s)
    alone_step, alone_row = (p / a if a else 0.0), (q / c if c else 0.0)
    misfit_step = fsum((seconds - alone_step * steps) ** 2 for steps, _, seconds in each)
    misfit_row = fsum((seconds - alone_row * turns) ** 2 for _, turns, seconds in each)
    if misfit_step < misfit_row:
        return Speed(prompt_token_s, alone_step, 0.0)
    return Speed(prompt_token_s, 0.0, alone_row)
