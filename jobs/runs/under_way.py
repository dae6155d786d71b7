"""How much of a shard is done while a worker is at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from .shard_fit import Extent


@dataclass(frozen=True)
class Tokens:
    """Of rows, those of their prompts and those of their answers."""

    prompts: float
    answers: float


@dataclass(frozen=True)
class Begun:
    """Tokens of a shard under way. prompts, answers: of answered rows. Of rows that are being answered:
    prompts_open, that are computed or were in the cache, prompts_ahead, still to be computed, and
    answers_open, so far."""

    prompts: int = 0
    prompts_open: int = 0
    prompts_ahead: int = 0
    answers: int = 0
    answers_open: int = 0


@dataclass(frozen=True)
class Running:
    """A shard under way. rows_done: of its rows, that have their answer. rows_open: that are being answered.

    extent: of what there is to compute. begun: None where the worker does not tell its tokens. lead_s: how
    long before its first row was computed it was opened, at started_at.
    """

    extent: Extent
    rows: float
    started_at: float
    worker: str
    rows_done: int
    rows_open: int = 0
    begun: Begun | None = None
    lead_s: float = 0.0

    @property
    def sent(self) -> float:
        """Share of its rows that have gone to the engine, answered or not."""
        return min(1.0, (self.rows_done + self.rows_open) / max(1.0, self.rows))

    def share_of_rows(self, now: float, held_s: float) -> float:
        """Return how much of its work is done, by its rows. held_s: for which shards are held.

        A row that is being answered is half done, on average; but in the beginning none is.
        """
        age = max(0.0, now - self.started_at)
        half = min(1.0, 4 * age / held_s) / 2 if held_s > 0 else 0.5
        return min(1.0, (self.rows_done + half * self.rows_open) / max(1.0, self.rows))

    def share_of_tokens(self, per_row: Tokens, is_steady: bool) -> float | None:
        """Return the same by its tokens; None where it has none. per_row: what its rows have on average.

        is_steady: as much of open rows' answers is to come as has come. What a token of a prompt costs beside
        one of an answer is not known: prompts and answers count the same.
        """
        if self.begun is None:
            return None
        begun, unsent = self.begun, max(0.0, self.rows - self.rows_done - self.rows_open)
        to_come = begun.answers_open if is_steady else max(0.0, self.new_answers(per_row))
        each = (
            (begun.prompts + begun.prompts_open, begun.prompts_ahead + unsent * per_row.prompts),
            (begun.answers + begun.answers_open, to_come + unsent * per_row.answers),
        )
        shares = [done / (done + left) for done, left in each if done + left > 0]
        return fsum(shares) / len(shares) if shares else None

    def new_answers(self, per_row: Tokens) -> float:
        """Return how many tokens of open rows' answers are to come if all of them have just begun."""
        open_ = self.begun.answers_open if self.begun is not None else 0
        return self.rows_open * per_row.answers - open_


def shares(
    running: Sequence[Running], per_row: Sequence[Tokens | None], now: float, held_s: float
) -> list[float]:
    """Return how much is done of each of these shards.

    Rows come and go all the time: on average as much of an open row's answer is to come as has come, be some
    ever so long. In a renewal process the time since the last event and that to the next one have the same
    distribution. Only while a worker's rows are all new, more is to come: average answers.
    """
    come: dict[str, float] = {}
    to_come: dict[str, float] = {}
    for each, tokens in zip(running, per_row, strict=True):
        if each.begun is not None and tokens is not None:
            come[each.worker] = come.get(each.worker, 0.0) + each.begun.answers_open
            to_come[each.worker] = to_come.get(each.worker, 0.0) + each.new_answers(tokens)
    found = []
    for each, tokens in zip(running, per_row, strict=True):
        share = None
        if tokens is not None:
            is_steady = come.get(each.worker, 0.0) >= to_come.get(each.worker, 0.0)
            share = each.share_of_tokens(tokens, is_steady)
        found.append(each.share_of_rows(now, held_s) if share is None else share)
    return found
