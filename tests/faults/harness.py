"""Fault after fault against real workers and a real Redis, with an audit after each scenario."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from tests.faults.faulty_worker import STEPS, Action, Strike, WorkerPlan, serve
from tests.faults.ledger import ROWS, Findings, Ledger
from tests.faults.proxy import lose_replies
from tests.faults.servers import DurableRedis

LEASE_S = 2
BACKLOG = 60
DRAIN_S = 90.0

_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload(
    ["tests.faults.faulty_worker", "worker.assembly", "worker.settings", "jobs.parquet.planner"]
)


class Harness:
    """One Redis, workers that come and go, and the ledger of what they were asked."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._rng = random.Random(seed)
        self._folder = folder
        for name in ("data", "marks", "logs", "redis"):
            (folder / name).mkdir()
        self._server = DurableRedis(folder / "redis")
        self._redis = Redis.from_url(self._server.url)
        self._ledger = Ledger(self._redis, folder / "data", self._rng)
        self._numbers = 0
        self._live: dict[str, tuple[WorkerPlan, ForkServerProcess]] = {}
        self.faults: Counter[str] = Counter()
        self.findings: dict[str, Findings] = defaultdict(Findings)

    def close(self) -> None:
        """End every process."""
        for _, process in self._live.values():
            process.kill()
            process.join()
        self._redis.close()
        self._server.close()

    # Workers

    def start(self, strike: Strike | None = None, url: str | None = None, answers: Path | None = None) -> str:
        """Start a worker; return its name."""
        self._numbers += 1
        name = f"w{self._numbers}"
        plan = WorkerPlan(name, url or self._server.url, self._folder, strike, LEASE_S, answers)
        process = _fork.Process(target=serve, args=(plan,), daemon=True)
        process.start()
        self._live[plan.name] = plan, process
        return plan.name

    def end(self, name: str, number: signal.Signals = signal.SIGKILL) -> int | None:
        """Signal a worker that still lives, wait for it and return its exit code."""
        plan, process = self._live.pop(name)
        if process.is_alive():
            _signal(process, number)
        deadline = time.monotonic() + 30
        while process.is_alive() and time.monotonic() < deadline:
            _signal(process, signal.SIGCONT)  # its strike may freeze it at any time
            process.join(0.1)
        if process.is_alive():
            _signal(process, signal.SIGUSR1)  # it prints its stacks
            process.join(0.5)
            process.kill()
            process.join()
            raise AssertionError(f"{name} ({plan.strike}) did not end: {plan.log.read_text()[-6000:]}")
        return process.exitcode

    def has_struck(self, name: str) -> bool:
        """Whether the worker's planned fault has come."""
        return self._live[name][0].mark.exists()

    def is_alive(self, name: str) -> bool:
        return self._live[name][1].is_alive()

    # Work

    def top_up(self) -> None:
        """Keep enough work waiting that every fault meets some."""
        if self._ledger.backlog() < BACKLOG:
            self._ledger.ask_jobs(40)
        if self._rng.random() < 0.04:
            self._ledger.ask_run()

    def settle(self, scenario: str, resume: bool = False) -> None:
        """Let clean workers finish everything, and audit. resume: submit failed runs again."""
        clean = [*self._live, *(self.start() for _ in range(2 - len(self._live)))]
        deadline = time.monotonic() + DRAIN_S
        while not self._ledger.all_ended() and time.monotonic() < deadline:
            time.sleep(0.1)
            if resume and not self._ledger.backlog():
                self._ledger.resume_failed_runs()
        for name in clean:
            code = self.end(name, signal.SIGTERM)
            # A worker may be told to stop before it has set up its handlers.
            assert code in (0, -signal.SIGTERM), f"a clean worker ended with {code}"
        found = self._ledger.audit()
        self.findings[scenario].add(found)
        self._redis.flushall()

    def a_moment(self, most_s: float) -> None:
        """Let a random time pass: the fault falls anywhere."""
        time.sleep(self._rng.uniform(0, most_s))

    # Scenarios

    def kills(self, count: int) -> None:
        """SIGKILL at named steps and at random times, four workers at once."""
        waiting: list[str] = []
        for _ in range(count):
            self.top_up()
            waiting.append(self.start(self._random_strike("kill") if self._rng.random() < 0.7 else None))
            if len(waiting) == 4:
                self._kill(waiting.pop(0))
        for name in waiting:
            self._kill(name)
        self.settle("SIGKILL")

    def kills_at_every_step(self) -> None:
        """SIGKILL before and after the first passage of each step, one worker at a time."""
        for step in STEPS:
            for after in (False, True):
                self.top_up()
                if step.startswith(("part", "shard", "run", "manifest", "plan", "file", "leftover")):
                    self._ledger.ask_run()
                self._kill(self.start(Strike(step, after, 1, "kill")))
        self.settle("SIGKILL")

    def kill_half_way_through_a_run(self) -> tuple[int, int]:
        """One Parquet run, its worker killed at half; return sequences completed in all, and rows."""
        answers = self._folder / "answers"
        self._ledger.ask_run(rows_per_shard=2)
        first = self.start(answers=answers)
        while self._ledger.parts_written() < ROWS / 2 / 2:
            time.sleep(0.005)
        self.end(first)
        self.faults["SIGKILL half-way through a run"] += 1
        for _ in range(2):
            self.start(answers=answers)
        self.settle("half-way")
        return answers.stat().st_size, ROWS

    def _kill(self, name: str) -> None:
        plan = self._live[name][0]
        deadline = time.monotonic() + self._rng.uniform(0.12, 0.4 if plan.strike is None else 0.8)
        while self.is_alive(name) and time.monotonic() < deadline:
            time.sleep(0.005)
        struck = self.has_struck(name)
        self.end(name)
        strike = plan.strike
        where = (
            f"{'after' if strike.after else 'before'} {strike.step}" if struck and strike else "random time"
        )
        self.faults[f"SIGKILL {where}"] += 1

    def _random_strike(self, action: Action, steps: list[str] | None = None) -> Strike:
        step = self._rng.choice(steps or list(STEPS))
        nth = self._rng.choice((1, 1, 2, 3, 5, 8)) * (20 if step in ("command sent", "engine step") else 1)
        return Strike(step, self._rng.random() < 0.5, nth, action)

    def freezes(self, count: int) -> None:
        """SIGSTOP for longer than the lease, at named steps and at random times; then SIGCONT."""
        for start in range(0, count, 6):
            frozen = []
            for _ in range(min(6, count - start)):
                self.top_up()
                frozen.append(self.start(self._random_strike("freeze")))
                self.a_moment(0.2)
            self.a_moment(0.3)
            for name in frozen:
                self.faults["SIGSTOP past the lease"] += 1
                _signal(self._live[name][1], signal.SIGSTOP)
            other = self.start()
            time.sleep(LEASE_S + 1.5)  # the fault is the time itself
            for name in frozen:
                _signal(self._live[name][1], signal.SIGCONT)
            self.a_moment(0.5)
            for name in [*frozen, other]:
                self.end(name, signal.SIGTERM)
        self.settle("SIGSTOP")

    def shutdowns(self, count: int) -> None:
        """SIGTERM, or SIGINT twice, in the middle of work."""
        for turn in range(count):
            self.top_up()
            name = self.start()
            self.a_moment(0.5)
            cold = turn % 3 == 0
            if cold:
                _signal(self._live[name][1], signal.SIGINT)
                time.sleep(1.05)  # sooner it counts as the same wish
                self.top_up()
            self.faults["SIGINT twice" if cold else "SIGTERM"] += 1
            self.end(name, signal.SIGINT if cold else signal.SIGTERM)
        self.settle("shutdown")

    def cut_connections(self, count: int) -> None:
        """CLIENT KILL of everybody, again and again, under two workers."""
        names = [self.start(), self.start()]
        for _ in range(count):
            self.top_up()
            self.a_moment(0.2)
            self._redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            self.faults["CLIENT KILL"] += 1
        for name in names:
            self.end(name, signal.SIGTERM)
        self.settle("CLIENT KILL")

    def lost_replies(self, count: int) -> None:
        """A line that drops replies: the command was carried out, the worker does not know."""
        socket = self._folder / "redis" / "p"
        proxy = _fork.Process(
            target=lose_replies, args=(socket, self._folder / "redis" / "s", 0.03, self._rng.randrange(2**32))
        )
        proxy.start()
        while not socket.exists():
            time.sleep(0.01)
        try:
            for _ in range(count):
                self.top_up()
                name = self.start(url=f"unix://{socket}")
                time.sleep(self._rng.uniform(0.3, 1.5))
                self.end(name)
                self.faults["lossy line, then SIGKILL"] += 1
        finally:
            proxy.kill()
            proxy.join()
            socket.unlink()
        self.settle("lost replies")

    def server_faults(self, count: int) -> None:
        """Redis killed and restarted, frozen past the lease, or out of memory, under two workers."""
        names = [self.start(), self.start()]
        faults: list[tuple[str, Callable[[], None]]] = [
            ("Redis killed and restarted", self._restart_server),
            ("Redis frozen past the lease", self._freeze_server),
            ("Redis out of memory", self._fill_server),
        ]
        for turn in range(count):
            self.top_up()
            self.a_moment(0.5)
            what, fault = faults[turn % 3]
            fault()
            self.faults[what] += 1
        for name in names:
            assert self.end(name, signal.SIGTERM) == 0, "a worker did not survive an outage"
        self.settle("Redis")

    def _restart_server(self) -> None:
        self._server.kill()
        self.a_moment(0.5)
        self._server.restart()
        self._reconnect()

    def _freeze_server(self) -> None:
        self._server.freeze()
        time.sleep(LEASE_S + 1)  # the fault is the time itself
        self._server.thaw()

    def _fill_server(self) -> None:
        self._redis.config_set("maxmemory", 1)
        self.a_moment(1.0)
        self._redis.config_set("maxmemory", 0)

    def _reconnect(self) -> None:
        with suppress(RedisError):
            self._redis.ping()

    def disk_full(self, count: int) -> None:
        """A worker on a full disk fails its shards; the run is submitted again and completes."""
        steps = ["file opened", "part written", "part published", "manifest text", "manifest renamed"]
        for _ in range(count):
            self._ledger.ask_run()
            self.top_up()
            name = self.start(self._random_strike("disk full", steps))
            time.sleep(self._rng.uniform(0.3, 0.8))
            self.end(name, signal.SIGTERM)
            self.faults["disk full"] += 1
        self.settle("disk full", resume=True)

    def engine_errors(self, count: int) -> None:
        """The engine raises in the middle of a step: the worker ends with an error, its jobs go on."""
        for _ in range(count):
            self.top_up()
            name = self.start(self._random_strike("engine error", ["engine step"]))
            self.a_moment(0.6)
            struck = self.has_struck(name)
            code = self.end(name, signal.SIGTERM)
            assert code == 1 or not struck, f"a worker whose engine failed ended with {code}"
            self.faults["engine error"] += 1
        self.settle("engine error")

    def one_of_each(self, kills: int) -> None:
        """A round of every scenario, most of it kills."""
        self.kills(kills)
        self.freezes(max(3, kills // 60))
        self.shutdowns(max(3, kills // 60))
        self.cut_connections(max(5, kills // 10))
        self.lost_replies(max(3, kills // 60))
        self.server_faults(max(3, kills // 60))
        self.disk_full(max(2, kills // 100))
        self.engine_errors(max(2, kills // 100))

    @property
    def num_kills(self) -> int:
        """SIGKILLs of workers so far."""
        return sum(count for kind, count in self.faults.items() if "SIGKILL" in kind)

    def table(self) -> str:
        """Faults by kind, then what the audits found."""
        lines = [f"{count:6d}  {kind}" for kind, count in sorted(self.faults.items())]
        lines.append(f"{sum(self.faults.values()):6d}  faults in all\n")
        lines.append(f"{'scenario':<16}{'jobs':>8}{'rows':>8}{'lost':>6}{'doubled':>9}{'orphaned':>10}")
        total = Findings()
        for scenario, found in self.findings.items():
            lines.append(_row(scenario, found))
            total.add(found)
        lines.append(_row("all", total))
        return "\n".join(lines + total.details[:50])

    def is_clean(self) -> bool:
        """Whether no audit found anything."""
        return not any(f.lost or f.doubled or f.orphaned for f in self.findings.values())


def _row(name: str, f: Findings) -> str:
    return f"{name:<16}{f.jobs:>8}{f.rows:>8}{f.lost:>6}{f.doubled:>9}{f.orphaned:>10}"


def _signal(process: Any, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)


@contextmanager
def harness(folder: Path, seed: int) -> Iterator[Harness]:
    """A harness that leaves no process behind."""
    running = Harness(folder, seed)
    try:
        yield running
    finally:
        running.close()
