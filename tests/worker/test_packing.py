"""The packer keeps every lane's place in the engine, whatever jobs come and end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.tasks import Request
from worker.packing import Packer, RunningJob

LANES, SLOTS, PREFETCH = 3, 8, 4


def job(number: int, lane: int, sizes: list[int]) -> RunningJob:
    requests = iter([Request("p", None, {"n": n}) for n in sizes])
    return RunningJob(number, cast(Any, SimpleNamespace()), lane, requests=requests)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("stream"), st.integers(0, LANES - 1), st.lists(st.integers(1, 3), max_size=30)),
            st.tuples(st.just("deliver"), st.integers(0, 1000), st.none()),
            st.tuples(st.just("forget"), st.integers(0, 1000), st.none()),
        ),
        max_size=60,
    )
)
def test_any_history_keeps_the_counts_the_order_and_the_room_of_urgent_lanes(history: list[Any]) -> None:
    packer = Packer(LANES, SLOTS, PREFETCH, 4)
    jobs: list[RunningJob] = []
    for kind, number, sizes in history:
        if kind == "stream":
            jobs.append(job(len(jobs), number, sizes))
            packer.stream(jobs[-1])
        elif jobs and kind == "deliver":
            chosen = jobs[number % len(jobs)]
            if chosen.open_requests:
                index = next(iter(chosen.open_requests))
                packer.delivered(chosen, chosen.samples.pop(index))
                del chosen.open_requests[index]
        elif jobs:
            chosen = jobs[number % len(jobs)]
            packer.forget(chosen)
            chosen.open_requests.clear()
            chosen.samples.clear()
        for pulled, index, _ in packer.pull():
            same_lane = [j for j in jobs if j.lane == pulled.lane and j.number < pulled.number]
            waiting = [j for j in same_lane if j in packer._streams[pulled.lane]]
            assert waiting == [], "a later job was served before an earlier one of its lane"
            assert index in pulled.open_requests

        in_engine = packer.in_engine
        for lane in range(LANES):
            held = sum(sum(j.samples.values()) for j in jobs if j.lane == lane)
            assert in_engine[lane] == held
            ahead = sum(in_engine[:lane])
            assert in_engine[lane] <= SLOTS + PREFETCH + 2  # one request of up to 3 samples may overshoot
            # What waits, waits for its own lane or for more urgent ones, never for those below.
            if packer._streams[lane]:
                assert ahead + in_engine[lane] >= SLOTS + PREFETCH or in_engine[lane] >= PREFETCH
                assert packer.claim_room(lane) == 0


def test_a_full_bulk_batch_leaves_the_high_lane_all_its_room() -> None:
    packer = Packer(2, SLOTS, PREFETCH, 4)
    packer.stream(job(0, 1, [1] * 100))
    assert len(list(packer.pull())) == SLOTS + PREFETCH
    assert packer.claim_room(0) == SLOTS + PREFETCH
    assert packer.claim_room(1) == 0


def test_a_flooded_high_lane_leaves_bulk_a_few_places() -> None:
    packer = Packer(2, SLOTS, PREFETCH, 4)
    packer.stream(job(0, 0, [1] * 100))
    packer.stream(job(1, 1, [1] * 100))
    lanes = [pulled.lane for pulled, *_ in packer.pull()]
    assert lanes == [0] * (SLOTS + PREFETCH) + [1] * PREFETCH


def test_the_next_job_of_a_lane_is_claimed_when_the_last_stream_is_dry() -> None:
    packer = Packer(1, SLOTS, PREFETCH, 4)
    long, short = job(0, 0, [1] * (SLOTS + PREFETCH + 1)), job(1, 0, [1])
    packer.stream(long)
    list(packer.pull())
    assert packer.claim_room(0) == 0
    packer.delivered(long, 2)
    list(packer.pull())
    assert long.exhausted
    assert packer.claim_room(0) == 1
    packer.stream(short)
    assert [pulled.number for pulled, *_ in packer.pull()] == [1]
