"""What hits workers: kills, freezes, shutdowns, errors of the engine, and clocks that jump."""

import signal
import time

from tests.faults.faulty_worker import STEPS, Strike
from tests.faults.harness import LEASE_S, Harness
from tests.faults.older_client import OlderClient

AT_ONCE = 8
"""Workers that live at the same time while one after the other is killed."""

RUN_STEPS = [
    step
    for step in STEPS
    if step.startswith(("part", "shard", "run", "manifest", "plan", "file", "leftover"))
]


def kills(faults: Harness, count: int) -> None:
    """SIGKILL at named steps and at random times, several workers at once."""
    hunted: dict[str, float | None] = {}
    started = 0
    while started < count or hunted:
        while started < count and len(hunted) < AT_ONCE:
            faults.top_up()
            strike = faults.random_strike("kill") if faults.rng.random() < 0.7 else None
            started += 1
            # One in ten of the unplanned kills may hit a worker that has not begun any job.
            early = strike is None and faults.rng.random() < 0.1
            due = time.monotonic() + faults.rng.uniform(0, 0.3) if early else None
            hunted[faults.start(strike)] = due
        for name, due in list(hunted.items()):
            if due is None and faults.plan_of(name).has_work.exists():
                planned = faults.plan_of(name).strike is not None
                hunted[name] = time.monotonic() + faults.rng.uniform(
                    *((0.3, 1.5) if planned else (0.0, 0.4))
                )
            elif not faults.is_alive(name) or (due is not None and time.monotonic() > due):
                del hunted[name]
                _kill(faults, name)
            elif due is None and started == count:
                hunted[name] = time.monotonic() + 1.0  # the last ones may find no work left
        time.sleep(0.005)
    faults.settle("SIGKILL")


def two_clients(faults: Harness, count: int) -> None:
    """SIGKILL of workers while producers with RQ 2.12 and 3 enqueue on the same queues."""
    with OlderClient(faults.server.url, faults.folder / "older") as older:
        faults.ledger.older = older
        kills(faults, count)
    faults.ledger.older = None


def _kill(faults: Harness, name: str) -> None:
    """Kill a worker, unless its strike has; it makes no difference to anybody else."""
    strike, struck = faults.plan_of(name).strike, faults.has_struck(name)
    faults.end(name)
    after = "after" if strike is not None and strike.after else "before"
    faults.count(f"SIGKILL {after} {strike.step}" if strike and struck else "SIGKILL random time")


def kills_at_every_step(faults: Harness) -> None:
    """SIGKILL before and after the first passage of each step, one worker at a time."""
    for step in STEPS:
        for after in (False, True):
            faults.top_up()
            if step in RUN_STEPS:
                faults.ledger.ask_run()
            name = faults.start(Strike(step, after, 1, "kill"))
            deadline = time.monotonic() + faults.rng.uniform(0.2, 0.8)
            while faults.is_alive(name) and time.monotonic() < deadline:
                time.sleep(0.005)
            _kill(faults, name)
    faults.settle("SIGKILL")


def freezes(faults: Harness, count: int) -> None:
    """SIGSTOP for longer than the lease, at named steps and at random times; then SIGCONT."""
    for start in range(0, count, 6):
        frozen = []
        for _ in range(min(6, count - start)):
            faults.top_up()
            frozen.append(faults.start(faults.random_strike("freeze")))
            faults.a_moment(0.2)
        faults.a_moment(0.3)
        for name in frozen:
            faults.count("SIGSTOP past the lease")
            faults.send(name, signal.SIGSTOP)
        other = faults.start()
        time.sleep(LEASE_S + 1.5)  # the fault is the time itself
        for name in frozen:
            faults.send(name, signal.SIGCONT)
        faults.a_moment(0.5)
        for name in [*frozen, other]:
            faults.end(name, signal.SIGTERM)
    faults.settle("SIGSTOP")


def shutdowns(faults: Harness, count: int) -> None:
    """SIGTERM, or SIGINT twice, in the middle of work."""
    for turn in range(count):
        faults.top_up()
        name = faults.start()
        faults.a_moment(0.5)
        cold = turn % 3 == 0
        if cold:
            faults.send(name, signal.SIGINT)
            time.sleep(1.05)  # sooner it counts as the same wish
            faults.top_up()
        faults.count("SIGINT twice" if cold else "SIGTERM")
        faults.end(name, signal.SIGINT if cold else signal.SIGTERM)
    faults.settle("shutdown")


def engine_errors(faults: Harness, count: int) -> None:
    """The engine raises in the middle of a step: the worker ends with an error, its jobs go on."""
    for _ in range(count):
        faults.top_up()
        name = faults.start(faults.random_strike("engine error", ["engine step"]))
        faults.a_moment(0.6)
        struck = faults.has_struck(name)
        faults.end_cleanly(name, (1,) if struck else (0, 1, -signal.SIGTERM))
        faults.count("engine error")
    faults.settle("engine error")


def clock_jumps(faults: Harness, count: int) -> None:
    """A worker's wall clock jumps by hours beside another one's; one in two is killed after that."""
    other = faults.start()
    for turn in range(count):
        faults.top_up()
        faults.ledger.ask_run()
        hours = faults.rng.choice((-48, -6, -1, 1, 6, 48, 24 * 400))
        name = faults.start(faults.random_strike("clock jump"), jump_s=hours * 3600.0)
        time.sleep(faults.rng.uniform(0.5, 1.0) if turn % 4 else LEASE_S + 1)
        faults.count(f"clock {'forward' if hours > 0 else 'back'} by hours")
        if turn % 2:
            faults.count("SIGKILL after a clock jump")
            faults.end(name)
        else:
            faults.end_cleanly(name, (0, -signal.SIGTERM))
    faults.end_cleanly(other)
    faults.settle("clock jump")
