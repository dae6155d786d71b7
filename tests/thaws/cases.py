"""Who is frozen, at what, and what happens meanwhile; and what must have come of it in the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis

from jobs.errors import JobsError, PlanningUnderWay
from tests.thaws.freezing import Freezer, Killed
from tests.thaws.world import ROWS, Worker, World
from worker.store.records.claimed_job import ClaimedJob

# What the one that freezes is at: each leaves a job at the head of the queue, or a person's wish.


def _new_run(world: World) -> None:
    world.submit()


def _part_deleted(world: World) -> None:
    world.finish()
    world.delete_part()
    world.submit()


def _part_damaged(world: World) -> None:
    world.finish()
    world.damage_part()
    world.submit()


def _cancelled_and_submitted(world: World) -> None:
    world.submit()
    _run_next(world)
    world.cancel()
    world.submit()


def _first_shard(world: World) -> None:
    world.submit()
    _run_next(world)


def _first_shard_with_errors(world: World) -> None:
    _first_shard(world)
    world.unanswered = {0}


def _last_shard(world: World) -> None:
    _first_shard(world)
    _run_next(world)
    _run_next(world)


def _redone_shard(world: World) -> None:
    _part_damaged(world)
    _run_next(world)


def _failing_shard(world: World) -> None:
    world.all_fail = True
    world.submit(max_errors=1)
    _run_next(world)


def _retried_run(world: World) -> None:
    world.finish_with_errors()
    world.retry()


def _retried_shard(world: World) -> None:
    _retried_run(world)
    _run_next(world)


def _last_retried_shard(world: World) -> None:
    _retried_shard(world)
    _run_next(world)


def _grown_run(world: World) -> None:
    world.finish()
    world.grow()
    world.submit()


def _run_next(world: World) -> None:
    claimed = world.other.claim()
    assert claimed is not None
    world.other.run_to_its_end(claimed)


def _submitted_before(world: World) -> None:
    world.submit()
    _run_next(world)
    world.cancel()


def _finished_without_part(world: World) -> None:
    world.finish()
    world.delete_part()


@dataclass(frozen=True)
class Actor:
    """Who freezes. prepare: what comes before. work: what a person does; None for a worker's next job.
    refused: prompts that get no answer from the one that freezes."""

    name: str
    prepare: Callable[[World], None]
    work: Callable[[World, Redis], Any] | None = None
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def _submits(world: World, client: Redis) -> None:
    world.submit(client)


def _cancels(world: World, client: Redis) -> None:
    world.cancel(client)


ACTORS = [
    Actor("planner of a new run", _new_run),
    Actor("planner of a run whose part was deleted", _part_deleted),
    Actor("planner that redoes a damaged part", _part_damaged),
    Actor("planner of a run that was cancelled before", _cancelled_and_submitted),
    Actor("first shard", _first_shard),
    Actor("first shard, with errors", _first_shard_with_errors, refused=("p0",)),
    Actor("last shard", _last_shard),
    Actor("shard that replaces a damaged part", _redone_shard),
    Actor("shard whose errors stop the run", _failing_shard),
    Actor("planner of a retry", _retried_run),
    Actor("planner that extends a run", _grown_run),
    Actor("retried shard", _retried_shard, refused=("p0",)),
    Actor("last retried shard", _last_retried_shard, refused=("p3",)),
    Actor("submitter of a new run", lambda world: None, _submits),
    Actor("submitter of a cancelled run", _submitted_before, _submits),
    Actor("submitter of a run whose part was deleted", _finished_without_part, _submits),
    Actor("canceller", _first_shard, _cancels),
]


# What happens while it is frozen. `held`: its job, None for a person.


def _nothing(world: World, held: ClaimedJob | None) -> None:
    """It only was slow."""


def _finished(world: World, held: ClaimedJob | None) -> None:
    world.let_locks_lapse()
    if held is None:
        world.submit()
    else:
        world.take_over(held)
    world.other.drain()


def _its_job_done(world: World, held: ClaimedJob | None) -> None:
    world.let_locks_lapse()
    if held is None:
        world.submit()
    else:
        world.take_over(held)
    _run_next(world)


def _cancelled(world: World, held: ClaimedJob | None) -> None:
    world.let_locks_lapse()
    if not world.is_known():
        world.submit()
    world.cancel()


def _submitted_again(world: World, held: ClaimedJob | None) -> None:
    _cancelled(world, held)
    world.submit()


def _cancelled_and_finished(world: World, held: ClaimedJob | None) -> None:
    _submitted_again(world, held)
    world.other.drain()


def _finished_and_resumed(world: World, held: ClaimedJob | None) -> None:
    _cancelled_and_finished(world, held)
    if world.has_mark():
        world.delete_part(2)
    world.submit()
    _run_next(world)


def _extended(world: World, held: ClaimedJob | None) -> None:
    world.let_locks_lapse()
    if world.num_rows > ROWS:
        return
    world.grow()
    try:
        world.submit()
    except PlanningUnderWay:  # by the one that is frozen
        world.shrink()
    world.other.drain()


def _finished_and_retried(world: World, held: ClaimedJob | None) -> None:
    """What had errors has answers now, where it can have."""
    _finished(world, held)
    if not world.all_fail and world.is_known():
        world.retry()
        world.other.drain()


EVENTS: dict[str, Callable[[World, ClaimedJob | None], None]] = {
    "nothing": _nothing,
    "taken over and finished": _finished,
    "taken over and its job done": _its_job_done,
    "taken over, finished and retried": _finished_and_retried,
    "extended": _extended,
    "cancelled": _cancelled,
    "cancelled and submitted again": _submitted_again,
    "cancelled, submitted again and finished": _cancelled_and_finished,
    "finished, a part deleted, and submitted again": _finished_and_resumed,
}


@dataclass(frozen=True)
class Case:
    """One actor, frozen before call `at`, what happens meanwhile, and whether it dies a call after."""

    actor: Actor
    event: str
    at: int
    dies: bool

    def is_beyond_a_store(self, calls: Sequence[str]) -> bool:
        """Whether it freezes within the request that removes the mark of the end: a store takes no condition
        for that, so that the mark of an end that came meanwhile goes. Submitting again writes it."""
        call = calls[self.at] if self.at < len(calls) else ""
        return "_withdraw_success" in call.split() and "rename" in call.split() and call.endswith(".delete")

    def __str__(self) -> str:
        fate = "killed a call later" if self.dies else "goes on"
        return f"{self.actor.name}, frozen before call {self.at}, {self.event}, {fate}"


def calls_of(actor: Actor, redis: Redis, folder: Path, kind: type[World] = World) -> list[str]:
    """What the actor calls where nothing freezes it, as it comes."""
    freezer = Freezer()
    with closing(kind(redis, folder)) as world, kind.traced(freezer):
        actor.prepare(world)
        _act(actor, world, freezer)
        freezer.thaw()
    if freezer.error is not None:
        raise freezer.error
    return freezer.calls


def all_cases(actor: Actor, calls: Sequence[str]) -> Iterator[Case]:
    """Every way to freeze an actor before one of these calls, or behind the last."""
    for at in range(len(calls) + 1):
        for event in EVENTS:
            for dies in (False, True):
                yield Case(actor, event, at, dies)


def play(case: Case, redis: Redis, folder: Path, kind: type[World] = World) -> None:
    """Play a case to its end. Raises AssertionError where the run neither ends nor says why."""
    freezer = Freezer(case.at, case.dies)
    with closing(kind(redis, folder)) as world, kind.traced(freezer):
        case.actor.prepare(world)
        worker, held = _act(case.actor, world, freezer)
        try:
            EVENTS[case.event](world, held)
            world.note_answers()
            if worker is not None and held is not None:
                worker.heed(held)
        finally:
            freezer.thaw()
        _settle(world, freezer, worker, held)
        _check(case, world, freezer)


def _act(actor: Actor, world: World, freezer: Freezer) -> tuple[Worker | None, ClaimedJob | None]:
    client = freezer.client(str(world.redis.connection_pool.connection_kwargs["path"]))
    client.ping()
    if actor.work is not None:
        work = actor.work
        freezer.start(lambda: work(world, client))
        return None, None
    worker = Worker(world, "frozen", client)
    worker.refused = set(actor.refused)
    held = worker.claim()
    assert held is not None
    freezer.start(lambda: worker.run(held))
    return worker, held


def _settle(world: World, freezer: Freezer, worker: Worker | None, held: ClaimedJob | None) -> None:
    """Let all that is left come to its end, without anybody's help."""
    world.let_locks_lapse()
    if freezer.error is not None and not isinstance(freezer.error, (Killed, Exception)):
        raise freezer.error
    if worker is not None and held is not None:
        if isinstance(freezer.error, Killed):
            world.take_over(held)
        elif held.execution_id not in worker.stopped:
            worker.end(held, freezer.value, freezer.error)
    world.other.drain()
    assert not world.holds_jobs(), "a job is left with its holder"


def _check(case: Case, world: World, freezer: Freezer) -> None:
    """The run has ended or says why, without anybody's help where it was submitted last."""
    is_person = case.actor.work is not None
    may_end_otherwise = case.event == "cancelled" or world.all_fail or case.actor.work is _cancels
    if not world.is_known():
        assert is_person, "nobody knows of the run"
        assert case.dies, "nobody knows of the run"
    elif may_end_otherwise or (is_person and (case.dies or isinstance(freezer.error, JobsError))):
        world.check_ended(may_be_stale=case.event == "cancelled" or is_person)
    else:
        world.check_finished()
    world.submit(max_errors="100%")  # whatever came of it: this finishes it
    world.other.drain()
    world.check_finished()
    if world.unanswered:
        world.retry()
        world.other.drain()
        world.unanswered.clear()
        world.check_finished()


def sample(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    return random.Random(seed).sample(list(cases), min(count, len(cases)))
