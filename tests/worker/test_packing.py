"""The packer keeps every lane's place in the engine, whatever jobs come and end."""

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.tasks import Request
from tests.examples import examples
from tests.worker.guards import open_guard
from worker.io_thread.held.held_jobs import HeldJob, JobState
from worker.io_thread.held.packing import Packer

LANES, SLOTS, PREFETCH = 3, 8, 4


def job(number: int, lane: int, sizes: list[int], length: int | None = None) -> HeldJob:
    """length: what the job's task says of the number of its requests; one that knows is a file."""
    requests = iter([Request("p", None, {"n": n}) for n in sizes])
    opened = cast(Any, SimpleNamespace(num_requests=length))
    return HeldJob(
        number,
        cast(Any, SimpleNamespace()),
        lane,
        is_file=length is not None,
        open_task=opened,
        requests=requests,
    )


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("stream"),
                st.integers(0, LANES - 1),
                st.lists(st.integers(1, 3), max_size=30),
            ),
            st.tuples(st.just("deliver"), st.integers(0, 1000), st.none()),
            st.tuples(st.just("forget"), st.integers(0, 1000), st.none()),
        ),
        max_size=60,
    )
)
def test_any_history_keeps_the_counts_the_order_and_the_room_of_urgent_lanes(
    history: list[Any],
) -> None:
    packer = Packer(LANES, SLOTS, PREFETCH, 4, 2)
    jobs: list[HeldJob] = []
    for kind, number, sizes in history:
        if kind == "stream":
            jobs.append(job(len(jobs), number, sizes))
            packer.stream(jobs[-1])
        elif jobs and kind == "deliver":
            chosen = jobs[number % len(jobs)]
            if chosen.open_requests:
                index = next(iter(chosen.open_requests))
                packer.note_departed(chosen, chosen.num_samples.pop(index))
                del chosen.open_requests[index]
        elif jobs:
            chosen = jobs[number % len(jobs)]
            packer.forget(chosen)
            chosen.open_requests.clear()
            chosen.num_samples.clear()
        for pulled, index, _ in packer.pull(open_guard()):
            same_lane = [j for j in jobs if j.lane == pulled.lane and j.number < pulled.number]
            waiting = [j for j in same_lane if j in packer._streaming[pulled.lane]]
            assert waiting == [], "a later job was served before an earlier one of its lane"
            assert index in pulled.open_requests

        in_engine = packer.in_engine
        for lane in range(LANES):
            held = sum(sum(j.num_samples.values()) for j in jobs if j.lane == lane)
            assert in_engine[lane] == held
            ahead = sum(in_engine[:lane])
            assert (
                in_engine[lane] <= 2 * SLOTS + 2
            )  # one request of up to 3 num_samples may overshoot
            # What waits, waits for its own lane or for more urgent ones, never for those below.
            if packer._streaming[lane]:
                assert ahead + in_engine[lane] >= SLOTS + PREFETCH or in_engine[lane] >= PREFETCH
                assert packer.claim_room(lane) == 0


def test_a_full_bulk_batch_leaves_the_high_lane_all_its_room() -> None:
    packer = Packer(2, SLOTS, PREFETCH, 4, 2)
    packer.stream(job(0, 1, [1] * 100))
    assert len(list(packer.pull(open_guard()))) == SLOTS + PREFETCH
    assert packer.claim_room(0) == SLOTS + PREFETCH
    assert packer.claim_room(1) == 0


def test_the_next_job_of_a_lane_is_claimed_when_the_last_stream_is_dry() -> None:
    packer = Packer(1, SLOTS, PREFETCH, 4, 2)
    long, short = job(0, 0, [1] * (SLOTS + PREFETCH + 1)), job(1, 0, [1])
    packer.stream(long)
    list(packer.pull(open_guard()))
    assert packer.claim_room(0) == 0
    packer.note_departed(long, 3)
    list(packer.pull(open_guard()))
    assert long.state is JobState.SENT
    assert packer.claim_room(0) == 4
    packer.stream(short)
    assert [pulled.number for pulled, *_ in packer.pull(open_guard())] == [1]


def test_the_next_job_is_claimed_before_a_stream_of_known_length_is_dry() -> None:
    """With a batch or more left to read nothing is claimed; then as much as fills the batch up."""
    packer = Packer(1, SLOTS, PREFETCH, 4, 2)
    shard = job(0, 0, [1] * 30, length=30)
    packer.stream(shard)
    list(packer.pull(open_guard()))
    assert packer.claim_room(0) == 0
    packer.note_departed(shard, 12)
    list(packer.pull(open_guard()))
    assert shard.num_unread < SLOTS
    assert packer.claim_room(0) == SLOTS - shard.num_unread
    assert packer.claimable_files(0) == 2


def test_files_whose_parts_wait_to_be_written_keep_further_ones_in_the_queue() -> None:
    """As many as may be opened at once, and a batch of requests: fewer would stop the engine after small
    shards that end together."""
    packer = Packer(2, SLOTS, PREFETCH, 4, 2)
    answered = [job(number, 0, [1] * 3, length=3) for number in range(3)]
    for each in answered:
        assert packer.claimable_files(0) == packer.claimable_files(1) == 2
        packer.stream(each)
        assert len(list(packer.pull(open_guard()))) == 3
        packer.note_departed(each, 3)
        packer.note_finishing(each)
    assert packer.claimable_files(0) == packer.claimable_files(1) == 0, "9 requests of 3 files"
    assert packer.claim_room(0) > 0, "prompts are claimed all the same"
    packer.note_finished(answered[0])
    assert packer.claimable_files(0) == 2, "6 requests are less than a batch"
    large = job(3, 0, [1] * SLOTS, length=SLOTS)
    packer.stream(large)
    list(packer.pull(open_guard()))
    packer.note_finished(answered[1])
    packer.note_finished(answered[2])
    packer.note_finishing(large)
    assert packer.claimable_files(0) == 2, "one file, however large"
