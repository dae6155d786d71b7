"""Two lanes under pressure: bulk work never holds back a high prompt, and high prompts never stop bulk.

Who goes first inside the batch is the engine's choice, which the stub makes as the engine does; what is
tested here is that claiming, packing and finishing leave both lanes their part.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ops.load.report import Report
from ops.load.site import Site, audit, enqueue_prompts, site, unended

SLOTS, PREFETCH = 32, 8
SETTINGS = {
    "TOKENMILL_MAX_NUM_SEQS": str(SLOTS),
    "TOKENMILL_PREFETCH": str(PREFETCH),
    "STUB_STEP_S": "0.01",
}
INTERVAL = 400
"""Prompts of the flooding lane in one interval."""

#: A waiting lane gets one admission in twenty; counted between two looks, so not to the last one.
MIN_SHARE = 0.5 / 20


@dataclass(frozen=True)
class Count:
    """Jobs finished on each lane."""

    high: int
    bulk: int


def flood(bulk: int = 20_000, intervals: int = 20) -> Report:
    """First high prompts into a full bulk batch, then bulk prompts under a flood of high ones."""
    report = Report(
        f"flood: {SLOTS} slots, {bulk:,} bulk prompts, {intervals} intervals of {INTERVAL} high ones"
    )
    with site() as place:
        _high_into_bulk(place, report, bulk, intervals)
    with site() as place:
        _bulk_under_high(place, report, intervals)
    return report


def _count(place: Site) -> Count:
    return Count(place.redis.zcard("rq:finished:high"), place.redis.zcard("rq:finished:bulk"))


def _high_into_bulk(place: Site, report: Report, bulk: int, rounds: int) -> None:
    """Ask a handful of high prompts, again and again, while bulk has every slot."""
    high_queue, bulk_queue = place.queue("high"), place.queue("bulk")
    enqueue_prompts(bulk_queue, [f"bulk {n}" for n in range(bulk)], timeout=-1)
    place.start("w", settings=SETTINGS)
    place.wait(lambda: _count(place).bulk > SLOTS)
    asked: list[tuple[str, str]] = []
    most = 0
    for turn in range(rounds):
        before = _count(place).bulk
        prompts = [f"high {turn}.{n}" for n in range(5)]
        asked += zip(enqueue_prompts(high_queue, prompts, timeout=-1), prompts, strict=True)
        place.wait(lambda: _count(place).high == len(asked))  # noqa: B023  # waits here
        most = max(most, _count(place).bulk - before)
    left = bulk - _count(place).bulk
    found = audit(high_queue, asked)
    report.equal("high prompts without an answer", found.unanswered, 0)
    report.equal("high prompts answered twice", found.doubled, 0)
    report.at_least("bulk prompts that wait when the last high one is answered", left, 1)
    # They wait for a poll and for what is being written, not for the batch to empty.
    report.at_most("bulk prompts answered before the slowest five high ones", most, 40 * SLOTS, measured=True)
    place.stop()


def _bulk_under_high(place: Site, report: Report, intervals: int) -> None:
    """Keep the high lane full; count what bulk gets of each interval."""
    high_queue, bulk_queue = place.queue("high"), place.queue("bulk")
    prompts = [f"high {n}" for n in range(INTERVAL * (intervals + 2))]
    high_ids = enqueue_prompts(high_queue, prompts, timeout=-1)
    bulk_prompts = [f"bulk {n}" for n in range(len(prompts))]
    bulk_ids = enqueue_prompts(bulk_queue, bulk_prompts, timeout=-1)
    place.start("w", settings=SETTINGS)
    counts = []
    for number in range(1, intervals + 2):
        least = number * INTERVAL
        place.wait(lambda: _count(place).high >= least)  # noqa: B023  # as above
        counts.append(_count(place))
    shares = [
        (after.bulk - before.bulk) / (after.high - before.high + after.bulk - before.bulk)
        for before, after in pairwise(counts)
        if after.high > before.high
    ]
    report.at_least("intervals under the flood", len(shares), intervals // 2)
    report.at_least("bulk's smallest share of an interval", min(shares), MIN_SHARE)
    report.tell("bulk's mean share", sum(shares) / len(shares))
    place.wait(lambda: _count(place) == Count(len(high_ids), len(bulk_ids)))
    for name, queue, ids, texts in (
        ("high", high_queue, high_ids, prompts),
        ("bulk", bulk_queue, bulk_ids, bulk_prompts),
    ):
        found = audit(queue, zip(ids, texts, strict=True))
        report.equal(f"{name} prompts without an answer in the end", found.unanswered, 0)
        report.equal(f"{name} prompts answered twice", found.doubled, 0)
    place.wait(lambda: unended(place, "high", "bulk") == 0)
    place.stop()
