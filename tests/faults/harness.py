"""Real workers that come and go on a real Redis, what they were asked, and an audit after each scenario."""

import json
import os
import random
import shutil
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from redis import Redis

from tests.faults.faulty_worker import STEPS, Action, Strike, WorkerPlan, serve
from tests.faults.ledger import Findings, Ledger, Run
from tests.faults.mounts import Mounts
from tests.faults.servers import DurableRedis
from tests.forking import FORK

LEASE_S = 2
BACKLOG = 50
STUCK_S = 45.0


class Harness:
    """One Redis, workers that come and go, and the ledger; `evidence` keeps logs and Redis of a finding."""

    def __init__(
        self, folder: Path, seed: int, evidence: Path | None = None, is_secure: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.folder, self._evidence = folder, evidence
        for name in ("data", "marks", "logs", "redis"):
            (folder / name).mkdir()
        self.server = DurableRedis(folder / "redis", is_secure)
        self.redis = Redis.from_url(self.server.url)
        self.ledger = Ledger(self.redis, folder / "data", self.rng)
        self.mounts = Mounts()
        self._numbers = 0
        self._live: dict[str, tuple[WorkerPlan, ForkServerProcess]] = {}
        self._wrong: list[str] = []
        self.faults: Counter[str] = Counter()
        self.findings: dict[str, Findings] = defaultdict(Findings)

    def close(self) -> None:
        """End every process."""
        for _, process in self._live.values():
            process.kill()
            process.join()
        self.redis.close()
        self.server.close()
        self.mounts.close()

    def note(self, text: str) -> None:
        """Write down what the harness does, for whoever reads the evidence."""
        with (self.folder / "logs" / "harness").open("a") as log:
            log.write(f"{time.strftime('%H:%M:%S')}.{time.time() % 1:.3f} {text}\n"[:2000])

    def count(self, kind: str, times: int = 1) -> None:
        """Count a fault, for the table."""
        self.faults[kind] += times
        self.note(kind)

    def wrong(self, what: str) -> None:
        """Report at the next audit what the ledger does not see, such as an exit code."""
        self._wrong.append(what)

    # Workers

    def start(self, strike: Strike | None = None, url: str | None = None, **plan: Any) -> str:
        """Start a worker; return its name. plan: further fields of WorkerPlan."""
        self._numbers += 1
        name = f"w{self._numbers}"
        made = WorkerPlan(name, url or self.server.worker_url, self.folder, strike, LEASE_S, **plan)
        process = FORK.Process(target=serve, args=(made,), daemon=True)
        process.start()
        self._live[name] = made, process
        self.note(f"{name} starts with {strike} {plan}")
        return name

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a worker that may be gone already."""
        with suppress(ProcessLookupError):
            os.kill(self.pid_of(name), number)

    def end(self, name: str, number: signal.Signals = signal.SIGKILL) -> int | None:
        """Signal a worker that still lives, wait for it and return its exit code."""
        self.note(f"{name} gets {number.name}")
        plan, process = self._live[name]
        if process.is_alive():
            self.send(name, number)
        deadline = time.monotonic() + 30
        while process.is_alive() and time.monotonic() < deadline:
            self.send(name, signal.SIGCONT)  # its strike may freeze it at any time
            process.join(0.1)
        if process.is_alive():
            self.send(name, signal.SIGUSR1)  # it prints its stacks
            process.join(0.5)
            process.kill()
            process.join()
            self.wrong(f"{name} ({plan.strike}) did not end: {plan.log.read_text()[-6000:]}")
        del self._live[name]
        return process.exitcode

    def end_cleanly(self, name: str, codes: tuple[int, ...] = (0,)) -> None:
        """Ask a worker to stop; another exit code is a finding."""
        code = self.end(name, signal.SIGTERM)
        if code not in codes:
            log = self.folder / "logs" / name
            self.wrong(f"{name} ended with {code}, expected {codes}: {log.read_text()[-2000:]}")

    def plan_of(self, name: str) -> WorkerPlan:
        return self._live[name][0]

    def has_struck(self, name: str) -> bool:
        """Whether the worker's planned fault has come."""
        return self._live[name][0].mark.exists()

    def pid_of(self, name: str) -> int:
        return self._live[name][1].pid or 0

    def is_alive(self, name: str) -> bool:
        return self._live[name][1].is_alive()

    def random_strike(self, action: Action, steps: list[str] | None = None) -> Strike:
        """A strike at one of the steps, before or after one of its first passages."""
        step = self.rng.choice(steps or list(STEPS))
        nth = self.rng.choice((1, 1, 1, 2, 3, 5)) * (
            20 if step in ("command sent", "engine step") else 1
        )
        return Strike(step, self.rng.random() < 0.5, nth, action)

    # Work

    def top_up(self) -> None:
        """Keep enough work waiting that every fault meets some; half of the runs have two submitters."""
        if self.ledger.backlog() < BACKLOG:
            self.ledger.ask_jobs(25)
        if self.rng.random() < 0.04:
            self.ledger.ask_run(submitters=self.rng.choice((1, 2)))

    def a_moment(self, most_s: float) -> None:
        """Let a random time pass: the fault falls anywhere."""
        time.sleep(self.rng.uniform(0, most_s))

    def wait_for_parts(self, run: Run, count: int, timeout_s: float = 20.0) -> None:
        """Return once a run has that many parts, or none of its jobs is left."""
        deadline = time.monotonic() + timeout_s
        while len(run.parts()) < count and time.monotonic() < deadline:
            time.sleep(0.005)

    def settle(self, scenario: str, resume: bool = False, **plan: Any) -> None:
        """Let clean workers, of a WorkerPlan with `plan`, finish everything, and audit."""
        clean = [*self._live, *(self.start(**plan) for _ in range(2 - len(self._live)))]
        state, deadline = self.ledger.state(), time.monotonic() + STUCK_S
        while not self.ledger.all_ended():
            time.sleep(0.1)
            if resume and self.ledger.is_idle():
                self.ledger.resume_failed_runs()
            if (
                now := self.ledger.state()
            ) != state:  # a loaded machine is slow, and that is no loss
                state, deadline = now, time.monotonic() + STUCK_S
            elif time.monotonic() > deadline:
                self.wrong(f"nothing has moved for {STUCK_S} s: {state}")
                break
        for name in clean:  # a worker may be told to stop before it has set up its handlers
            self.end_cleanly(name, (0, -signal.SIGTERM))
        found = self.ledger.audit()
        found.wrong += len(self._wrong)
        found.details = self._wrong + found.details
        self._wrong = []
        if not found.is_clean:
            self._keep_evidence(scenario, found)
        self.findings[scenario].add(found)
        self.redis.flushall()
        for log in (self.folder / "logs").iterdir():
            log.unlink()

    def _keep_evidence(self, scenario: str, found: Findings) -> None:
        if self._evidence is None:
            return
        place = self._evidence / f"{scenario}-{sum(self.faults.values())}".replace(" ", "-")
        shutil.copytree(self.folder / "logs", place / "logs")
        (place / "findings").write_text("\n".join(found.details))
        with (place / "redis").open("w") as dump:
            for key, value in _everything_in(self.redis):
                dump.write(f"{key}\t{value}\n")
        names = sorted(str(path) for path in (self.folder / "data").rglob("*"))
        (place / "files").write_text("\n".join(names))

    # What came out

    @property
    def num_kills(self) -> int:
        """SIGKILLs of workers so far."""
        return sum(count for kind, count in self.faults.items() if "SIGKILL" in kind)

    def table(self) -> str:
        """Faults by kind, then what the audits found."""
        lines = [f"{count:6d}  {kind}" for kind, count in sorted(self.faults.items())]
        lines.append(
            f"{sum(self.faults.values()):6d}  faults in all, {self.num_kills} of them SIGKILLs\n"
        )
        lines.append(
            f"{'scenario':<24}{'jobs':>8}{'rows':>8}{'delivered':>11}{'redone':>8}"
            f"{'lost':>6}{'doubled':>9}{'orphaned':>10}{'wrong':>7}"
        )
        total = Findings()
        for scenario, found in self.findings.items():
            lines.append(_row(scenario, found))
            total.add(found)
        lines.append(_row("all", total))
        return "\n".join(lines + total.details[:50])

    def is_clean(self) -> bool:
        """Whether no audit found anything."""
        return all(found.is_clean for found in self.findings.values())


def _row(name: str, f: Findings) -> str:
    return (
        f"{name:<24}{f.jobs:>8}{f.rows:>8}{f.delivered:>11}{f.redone:>8}"
        f"{f.lost:>6}{f.doubled:>9}{f.orphaned:>10}{f.wrong:>7}"
    )


def _everything_in(redis: Redis) -> Iterator[tuple[str, str]]:
    readers = {
        b"string": redis.get,
        b"hash": redis.hgetall,
        b"list": lambda key: redis.lrange(key, 0, -1),
        b"set": redis.smembers,
        b"zset": lambda key: redis.zrange(key, 0, -1, withscores=True),
        b"stream": redis.xrange,
        b"none": lambda key: "expired meanwhile",
    }
    for key in sorted(redis.scan_iter(count=1000)):
        yield (
            key.decode("utf-8", "backslashreplace"),
            json.dumps(repr(readers[redis.type(key)](key))),
        )


@contextmanager
def harness(
    folder: Path, seed: int, evidence: Path | None = None, is_secure: bool = False
) -> Iterator[Harness]:
    """A harness that leaves no process and no mount behind."""
    running = Harness(folder, seed, evidence, is_secure)
    try:
        yield running
    finally:
        running.close()
