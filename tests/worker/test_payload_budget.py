"""How much of payloads a worker unpacks and holds at a time, lane by lane."""

from rq import Callback
from rq.command import send_stop_job_command
from rq.job import JobStatus
from rq.serializers import JSONSerializer

from tests.rq_workers import Workers, text_of, wait_until, wait_until_started
from worker.io_thread.held.held_jobs import HeldJob
from worker.io_thread.held.packing import PayloadBudget
from worker.store.records.claimed_job import ClaimedJob

MIB = 1 << 20


def job(number: int, lane: int, num_bytes: int) -> HeldJob:
    claimed = ClaimedJob(str(number), "e", "bulk", "w")
    return HeldJob(number, claimed, lane, payload_bytes=num_bytes)


def numbers(budget: PayloadBudget) -> list[int]:
    opened = []
    for each in budget.take():
        budget.note_opening(each)
        budget.note_opened(each)
        opened.append(each.number)
    return opened


def test_a_turn_opens_a_mebibyte_of_each_lane_and_the_urgent_one_first() -> None:
    budget = PayloadBudget(2, 64 * MIB)
    for number in range(8):
        budget.add(job(number, 1 - number % 2, MIB // 2))
    assert numbers(budget) == [1, 3, 0, 2]
    assert budget.can_open
    assert not budget.has_room(0)
    assert numbers(budget) == [5, 7, 4, 6]
    assert budget.has_room(0)


def test_jobs_beyond_the_budget_wait_for_those_before_them_and_for_no_other_lane(
    workers: Workers,
) -> None:
    queue = workers.queue("bulk")
    callback = Callback(
        "tests.worker.functions.ignore"
    )  # which may ask for the prompts when the job ends
    large = [
        queue.enqueue("jobs.complete", ["hang", "x" * MIB], on_failure=callback) for _ in range(3)
    ]
    workers.start(TOKENMILL_MAX_HELD_BYTES="1MiB")
    wait_until_started(large[0])
    urgent = workers.queue("high").enqueue("jobs.complete", "a", max_tokens=1)
    assert text_of(workers.result(urgent)) == "echo:a"
    assert [each.get_status() for each in large[1:]] == [JobStatus.QUEUED] * 2
    large[1].cancel()
    send_stop_job_command(workers.redis, large[0].id, serializer=JSONSerializer)
    wait_until(lambda: large[2].get_status() == JobStatus.STARTED)
