"""What hits workers among others: frozen while they begin, and beside workers of another model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.faults.harness import LEASE_S, Harness
from tests.faults.older_client import OlderClient
from tests.faults.worker_faults import kills

AT_ONCE = 5
BEGINNING_S = 3.0
LOAD = 5
MODELS = ("one", "other")


def thaws(faults: Harness, count: int) -> None:
    """SIGSTOP at random moments of fresh workers' first seconds, while they plan runs and take shards, on a
    machine that is loaded; SIGCONT when another worker has taken over."""
    with _load():
        for start in range(0, count, AT_ONCE):
            frozen = _freeze_while_they_begin(faults, min(AT_ONCE, count - start))
            other = faults.start()
            time.sleep(LEASE_S + 1.5)  # the fault is the time itself
            for name in frozen:
                faults.send(name, signal.SIGCONT)
            faults.ledger.ask_run()
            _wait_until_idle(faults)
            for name in [*frozen, other]:
                faults.end_cleanly(name, (0, -signal.SIGTERM))
    faults.settle("thaw")


def _freeze_while_they_begin(faults: Harness, count: int) -> list[str]:
    """Start workers in fresh interpreters, ask a run of each once it serves, and freeze it a moment later."""
    starting = [faults.start(fresh=True) for _ in range(count)]
    due: dict[str, float] = {}
    frozen: list[str] = []
    while len(frozen) < count:
        for name in starting:
            if name not in due and faults.redis.exists(f"rq:worker:{name}"):
                due[name] = time.monotonic() + faults.rng.uniform(0, BEGINNING_S)
                faults.ledger.ask_run()
            elif name not in frozen and time.monotonic() > due.get(name, float("inf")):
                faults.send(name, signal.SIGSTOP)
                faults.count("SIGSTOP in the first seconds")
                frozen.append(name)
            elif name not in due and not faults.is_alive(name):
                raise RuntimeError(f"{name} did not start: {faults.plan_of(name).log.read_text()}")
        time.sleep(0.002)
    return frozen


def _wait_until_idle(faults: Harness) -> None:
    """Return when nothing waits and runs, or nothing has moved for a while; the audit judges."""
    state, deadline = faults.ledger.state(), time.monotonic() + 20
    while not faults.ledger.is_idle() and time.monotonic() < deadline:
        if (now := faults.ledger.state()) != state:
            state, deadline = now, time.monotonic() + 20
        time.sleep(0.1)


@contextmanager
def _load() -> Iterator[None]:
    """Keep so many cores busy that the machine's load is at least LOAD."""
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(max(0, round(LOAD - os.getloadavg()[0])))
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def two_clients(faults: Harness, count: int) -> None:
    """SIGKILL of workers while producers with RQ 2.12 and 3 enqueue on the same queues."""
    with OlderClient(faults.server.url, faults.folder / "older") as older:
        faults.ledger.older = older
        kills(faults, count)
    faults.ledger.older = None


def two_models(faults: Harness, count: int) -> None:
    """Workers of two models share queues and runs, and are killed one after the other."""
    for turn in range(count):
        run = faults.ledger.ask_run(models=MODELS)
        faults.ledger.ask_run(models=MODELS[turn // 2 % 2 :][:1])
        hunted = [faults.start(faults.random_strike("kill"), served=MODELS[turn % 2])]
        hunted.append(faults.start(served=MODELS[1 - turn % 2]))
        faults.wait_for_parts(run, faults.rng.randrange(1, 20), timeout_s=2.0)
        for name in hunted:
            faults.count("SIGKILL beside another model")
            faults.end(name)
    for name in MODELS:
        faults.start(served=name)
    faults.settle("two models")
