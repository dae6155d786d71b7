"""Jobs that are fewer than the places of all workers are spread over them."""

import time
from dataclasses import replace
from uuid import uuid4

import pytest
from redis import Redis
from rq import Queue

from jobs.common.keys import SEQUENCES_FIELD
from jobs.common.workers import Point
from tests.worker.by_hand import LIMITS, ByHand
from worker.io_thread.claimer import FORGET_S, Claimer, FairShare
from worker.io_thread.limits import LEASE_MARGIN_S, LONGEST_POLL_S, POLL_S, PollRates
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import Claim, ClaimRequest
from worker.store.worker_record import WorkerRecord


def enqueue(bulk: Queue, number: int, sequences: int = 1) -> list[str]:
    ids = [bulk.enqueue("jobs.complete", "x", max_tokens=1).id for _ in range(number)]
    for job_id in ids:
        bulk.connection.hset(f"rq:job:{job_id}", SEQUENCES_FIELD, sequences)
    return ids


def claim(
    bulk: Queue, *, takers: int, held: int = 0, rounds_up: bool = False, most: int = 200
) -> Claim:
    wanted = ClaimRequest("bulk", most, uuid4().hex[:24], False, 200, 200, takers, held, rounds_up)
    return JobStore(bulk.connection, "w", lease_s=30).claim([wanted], float("inf"))[0]


def test_idle_workers_share_the_last_jobs_evenly(bulk: Queue) -> None:
    ids = enqueue(bulk, 8)
    first, second, third = (claim(bulk, takers=3) for _ in range(3))
    assert [len(each.jobs) for each in (first, second, third)] == [3, 3, 2]
    assert [each.first_left for each in (first, second, third)] == [ids[3], ids[6], ""]


def test_a_worker_with_its_share_leaves_jobs_to_others(bulk: Queue) -> None:
    enqueue(bulk, 4)
    assert len(claim(bulk, takers=1).jobs) == 4, "alone it takes all"
    [job_id] = enqueue(bulk, 1)
    later = claim(bulk, takers=2, held=4)
    assert (later.jobs, later.first_left) == ([], job_id)
    assert len(claim(bulk, takers=2).jobs) == 1, "who has none takes it"


def test_a_long_queue_knows_no_shares(bulk: Queue) -> None:
    enqueue(bulk, 40)
    taken = claim(bulk, takers=3, most=5)
    assert (len(taken.jobs), taken.first_left) == (5, "")


def test_no_worker_has_a_shard_more_while_another_has_one_less(bulk: Queue) -> None:
    ids = enqueue(bulk, 4, sequences=50)
    first = claim(bulk, takers=3)
    assert ([each.job_id for each in first.jobs], first.first_left) == (ids[:1], ids[1])
    assert claim(bulk, takers=3, held=1).jobs == []
    assert bulk.job_ids == ids[1:]
    assert len(claim(bulk, takers=3, held=1, rounds_up=True).jobs) == 1, "once nobody else took it"
    assert len(claim(bulk, takers=3).jobs) == 1, "who has none takes one at once"


def test_jobs_that_others_leave_are_taken_by_and_by() -> None:
    share = FairShare()
    share.note_left("a", 0.0, 1.0)
    share.note_left("a", 0.5, 1.0)
    assert share.divisor(8, 0.0) == (8, False), "the others had no time to look"
    found = []
    for look in range(1, 6):
        share.note_left("a", look, 1.0)
        found.append(share.divisor(8, look))
    assert found == [(8, True), (4, True), (2, True), (1, True), (1, True)]
    share.note_left("", 6, 1.0)
    assert share.divisor(8, 6) == (1, True)
    assert share.divisor(8, 6 + FORGET_S) == (8, False)


def test_a_worker_claims_its_share_and_what_nobody_else_takes(bulk: Queue) -> None:
    hand = ByHand(bulk.connection, slots=64)
    claimer = Claimer(hand.parts, hand.runner)
    enqueue(bulk, 6)
    hand.parts.poll_rates.note_load({"bulk": 3}, num_started=0)
    held = []
    for _ in range(4):
        claimer.claim(hand.moment)
        held.append(hand.runner.num_held)
        hand.moment += 1.1 * POLL_S
    hand.close()
    assert held == [2, 2, 2, 6]


def test_a_paused_worker_claims_nothing_even_if_a_lane_has_no_room_for_files(bulk: Queue) -> None:
    hand = ByHand(bulk.connection, slots=4)
    claimer = Claimer(hand.parts, hand.runner)
    hand.parts.packer.claimable_files = lambda lane: 0  # type: ignore[method-assign]
    enqueue(bulk, 1)
    claimer.pause(hand.moment + 1.0)
    claimer.claim(hand.moment)
    num_held_in_pause = hand.runner.num_held
    claimer.claim(hand.moment + 1.1)
    num_held_after = hand.runner.num_held
    hand.close()
    assert (num_held_in_pause, num_held_after) == (0, 1)


def test_many_workers_together_ask_no_more_often_than_a_few() -> None:
    poll_rates = PollRates(["bulk", "other"], LIMITS, jitter=lambda: 1.0)
    assert (poll_rates.poll_s(0), poll_rates.renew_s) == (POLL_S, 2.0)
    poll_rates.note_load({"bulk": 300, "other": 3}, num_started=6000)
    assert (poll_rates.poll_s(0), poll_rates.poll_s(1)) == (1.5, POLL_S)
    assert poll_rates.poll_s(1, num_passed=1_000_000) == pytest.approx(0.15), (
        "the server reads a thousand each time"
    )
    assert poll_rates.renew_s == 6.0
    poll_rates.note_load({"bulk": 5000}, num_started=10**6)
    assert (poll_rates.poll_s(0), poll_rates.renew_s) == (LONGEST_POLL_S, LIMITS.lease_s / 4)
    short = PollRates(["bulk"], replace(LIMITS, lease_s=2))
    short.note_load({"bulk": 300}, num_started=10**6)
    assert short.renew_s == 0.5, "a lease outlives two renewals that failed"


@pytest.mark.parametrize("interval_s", [1, 600])
def test_lease_and_sweep_keep_the_promised_time_to_recovery(interval_s: int) -> None:
    """At worst a worker dies right after it renewed, and its lease ends right after a sweep."""
    limits = replace(LIMITS, lease_s=interval_s + LEASE_MARGIN_S)
    assert limits.lease_s + limits.sweep_period_s + LONGEST_POLL_S <= interval_s + 60
    assert limits.renew_period_s * 2 < limits.lease_s


def test_workers_that_are_invented_or_silent_throttle_nobody(redis: Redis) -> None:
    redis.sadd("rq:workers:bulk", *(f"rq:worker:{number}" for number in range(1000)))
    for name, silent_s in (("silent", 60), ("too", 5), ("alive", 0)):
        moment = time.time() - silent_s
        record = WorkerRecord(
            redis, name, ["bulk"], lambda *_: None, {}, lambda moment=moment: moment
        )  # type: ignore[misc]
        record.show("busy", None, {}, Point(at=moment))
    assert record.count()[1] == {"bulk": 2}
