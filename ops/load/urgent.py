"""How soon a high prompt is claimed and answered while bulk work holds every slot, or every block.

The engine is the real one, on the CPU, with the demo model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from os import cpu_count, getloadavg
from pathlib import Path
from typing import Any

from rq.job import Job
from rq.results import Result

from ops.load.report import Report
from ops.load.site import Site, enqueue_prompts, site

MODEL = Path(__file__).resolve().parents[1] / "demo" / "model"
BLOCK_BYTES = 32 << 10
"""Of 16 tokens: keys and values of 4 layers with 2 heads of 32 values, in float32."""
SLOTS = 16
BLOCKS_PER_SLOT = {"slots": 32, "blocks": 12}
"""Of the pool. A bulk prompt comes to need 27: with 32 for each slot slots run out first, with 12 blocks."""
BULK_TOKENS, HIGH_TOKENS = 400, 8
MAX_GAP_S = 0.2
"""Prompts come at random times: in step with the worker's polls they would all wait as long."""
MAX_CLAIM_MS = 100


@dataclass
class Seen:
    """Of each high prompt, in ms: from enqueueing to its claim, to its end, and to its answer being here.

    The first two are by the times in the job's hash: that of its claim was taken when the call was sent.
    looks: what the worker said of its engine meanwhile.
    """

    claimed: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)


def urgent(prompts: int = 300, kinds: Sequence[str] = ("slots", "blocks")) -> Report:
    """Ask `prompts` high prompts one by one into bulk work that holds all slots, then all blocks."""
    report = Report(f"urgent: {prompts} high prompts into a batch full of bulk work, {SLOTS} slots")
    for held in kinds:
        with site() as place:
            _ask_all(place, report, held, SLOTS * BLOCKS_PER_SLOT[held], prompts)
    report.tell(
        "load of the machine in the last minute, and its CPUs", f"{getloadavg()[0]:.1f}, {cpu_count()}"
    )
    return report


def _ask_all(place: Site, report: Report, held: str, num_blocks: int, prompts: int) -> None:
    settings = {
        "worker_class": "worker.BatchWorker",
        "TOKENMILL_MODEL": str(MODEL),
        "TOKENMILL_DEVICE": "cpu",
        "TOKENMILL_DTYPE": "float32",
        "TOKENMILL_TORCH_THREADS": "1",
        "TOKENMILL_MAX_NUM_SEQS": str(SLOTS),
        "TOKENMILL_KV_CACHE_BYTES": str(num_blocks * BLOCK_BYTES),
    }
    rng, seen = random.Random(1), Seen()
    _keep_bulk_waiting(place)
    place.start("w", settings=settings)
    place.wait(lambda: place.stats("w").get("num_waiting", 0) > 0)
    before = place.stats("w")
    for number in range(prompts):
        time.sleep(rng.uniform(0, MAX_GAP_S))
        _keep_bulk_waiting(place)
        _ask_one(place, number, seen)
    asked_at = time.time()
    place.wait(lambda: place.stats("w")["updated_at"] > asked_at)
    last = place.stats("w")
    report.equal(f"{held} held: high prompts answered", len(seen.answered), prompts)
    waiting = min((look["num_waiting"] for look in seen.looks), default=0)
    report.at_least(f"{held} held: bulk prompts that wait in the engine, at the fewest", waiting, 1)
    for what in ("num_running", "free_blocks") if seen.looks else ():
        values = [look[what] for look in seen.looks]
        report.tell(f"{held} held: {what}, least and most", f"{min(values)}, {max(values)}")
    told = {name: last[name] - before[name] for name in ("num_preemptions", "updated_at", "num_steps")}
    report.tell(f"{held} held: preemptions", told["num_preemptions"])
    report.tell(f"{held} held: ms a step", 1000 * told["updated_at"] / told["num_steps"])
    _tell(report, f"{held} held: ms from enqueueing to the claim", seen.claimed)
    report.at_most(f"{held} held: p99 of that", quantile(seen.claimed, 0.99), MAX_CLAIM_MS, measured=True)
    _tell(report, f"{held} held: ms to the end", seen.ended)
    _tell(report, f"{held} held: ms to the answer, at its producer", seen.answered)


def _keep_bulk_waiting(place: Site) -> None:
    queue = place.queue("bulk")
    if len(queue) < 4 * SLOTS:
        sampling = {"max_tokens": BULK_TOKENS, "ignore_eos": True}
        prompts = [f"bulk {random.random()}" for _ in range(8 * SLOTS)]
        enqueue_prompts(queue, prompts, sampling, timeout=-1, result_ttl=0)


def _ask_one(place: Site, number: int, seen: Seen) -> None:
    started = time.perf_counter()
    sampling = {"max_tokens": HIGH_TOKENS, "ignore_eos": True}
    (job_id,) = enqueue_prompts(place.queue("high"), [f"high {number} " * 5], sampling)
    result = Job(job_id, connection=place.redis, serializer="json").latest_result(timeout=60)
    answered_s = time.perf_counter() - started
    if result is None or result.type is not Result.Type.SUCCESSFUL:
        return
    job = Job.fetch(job_id, place.redis, "json")
    assert job.enqueued_at is not None
    assert job.started_at is not None
    assert job.ended_at is not None
    seen.claimed.append(1000 * (job.started_at - job.enqueued_at).total_seconds())
    seen.ended.append(1000 * (job.ended_at - job.enqueued_at).total_seconds())
    seen.answered.append(1000 * answered_s)
    seen.looks.append(place.stats("w"))


def _tell(report: Report, what: str, values: Sequence[float]) -> None:
    figures = ", ".join(f"{quantile(values, share):.0f}" for share in (0.5, 0.99, 1.0))
    report.tell(f"{what}: p50, p99, most", figures)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least a share of them does not exceed; infinite where there is none."""
    return sorted(values)[ceil(share * len(values)) - 1] if values else float("inf")
