"""What 3, 30, 100 or 300 nodes ask of one Redis: a simulation, made of costs that are measured here and now.

    python -m ops.bench.fleet
    python -m ops.bench.fleet --check 100

Each node has the worker's duties at the periods of the worker's own code, and Redis is one server that
carries out one request after the other. `--check` compares the simulation of so many idle nodes with as many
idle workers, which do in threads what a worker without jobs does, with the code of the store.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from redis import Redis

from jobs.watch.samples import POINT_PERIOD_S
from ops.bench.fleet_duties import LEASE_S, QUEUES, SWEEP_S, Costs, IdleWorker, measure
from ops.bench.report import print_machine
from ops.bench.table import print_table
from ops.load.redis_usage import look, since
from tests.redis_server import running_redis_server
from worker.io_thread.fleet import Fleet
from worker.io_thread.limits import Limits
from worker.io_thread.reporter import RECORD_PERIOD_S

NODES = (3, 30, 100, 300)
SLOTS = 256
JOB_S = 10.0
"""How long a job runs: so many times its rate are held by a node, at most its places twice."""

CLAIM_S = 0.25
"""A node under load claims what it has ended within this time."""

PAGE_S = 2.0
"""How often a page that is open is made anew."""

FULL = 0.7
"""Share of Redis' core beyond which waiting grows fast: what one Redis should be asked for."""


KINDS = ("jobs", "leases", "looks", "records", "keys", "sweeps", "pages")
"""Of duties, as the table sums them up."""

IDLE_DUTIES = (
    IdleWorker.show,
    IdleWorker.keep,
    IdleWorker.look_at_keys,
    IdleWorker.sweep,
    IdleWorker.look_for_jobs,
)
"""As `duties` yields those of a node without jobs."""


@dataclass(frozen=True)
class Load:
    """What each node does: jobs it ends in a second, and how long one runs."""

    name: str
    jobs_per_s: float = 0.0
    job_s: float = JOB_S

    @property
    def held(self) -> float:
        return min(self.jobs_per_s * self.job_s, 2.0 * SLOTS)


LOADS = (
    Load("idle"),
    Load("a shard a minute", 1 / 60, 60.0),
    Load("20 jobs/s a node", 20.0),
    Load("200 jobs/s a node", 200.0, 1.0),
)


@dataclass(frozen=True)
class Duty:
    """Something that is done again and again. cost_us: of Redis. what: under which it is summed up."""

    what: str
    period_s: float
    cost_us: float


@dataclass(frozen=True)
class Found:
    """Shares of Redis' core that were asked for, in all and by kind of duty; and for how long requests waited
    before they were begun on, sorted."""

    share: float
    by_kind: dict[str, float]
    wait_ms: list[float]

    def wait(self, quantile: float) -> float:
        return self.wait_ms[int(quantile * (len(self.wait_ms) - 1))]


def duties(costs: Costs, nodes: int, load: Load) -> Iterator[Duty]:
    """Those of one node among so many."""
    limits = Limits(False, None, None, LEASE_S, 5, 16, None)
    fleet = Fleet(QUEUES, limits, jitter=lambda: 1.0)
    fleet.hear(dict.fromkeys(QUEUES, nodes), int(nodes * load.held))
    yield Duty("records", RECORD_PERIOD_S, costs.show)
    yield Duty("records", POINT_PERIOD_S, costs.keep)
    yield Duty("keys", fleet.keys_s, costs.keys)
    yield Duty("sweeps", SWEEP_S, costs.sweep)
    if load.held < SLOTS:
        yield Duty("looks", fleet.poll_s(0), costs.look)
    if load.held:
        yield Duty("leases", fleet.renew_s, load.held * costs.renew_us)
    if load.jobs_per_s:
        period_s = max(CLAIM_S, 1 / load.jobs_per_s)
        batch = period_s * load.jobs_per_s
        yield Duty("jobs", period_s, costs.call_us + batch * costs.job_us)


def simulate(
    costs: Costs, nodes: int, load: Load, pages: int = 1, seconds: float = 20.0, seed: int = 1
) -> Found:
    """Let nodes begin at moments of their own, and Redis carry out what they ask in its turn."""
    rng = random.Random(seed)
    all_duties = [duty for _ in range(nodes) for duty in duties(costs, nodes, load)]
    all_duties += [Duty("pages", PAGE_S, nodes * costs.sample_us)] * pages
    all_duties.append(Duty("sweeps", SWEEP_S, nodes * load.held * costs.held_us))
    due = [(rng.uniform(0, duty.period_s), number) for number, duty in enumerate(all_duties)]
    heapq.heapify(due)
    spent: defaultdict[str, float] = defaultdict(float)
    free_at, waits = 0.0, []
    while due[0][0] < seconds:
        moment, number = heapq.heappop(due)
        duty = all_duties[number]
        waits.append(1000 * max(0.0, free_at - moment))
        free_at = max(free_at, moment) + duty.cost_us / 1e6
        spent[duty.what] += duty.cost_us / 1e6 / seconds
        heapq.heappush(due, (moment + duty.period_s * rng.uniform(0.9, 1.1), number))
    return Found(sum(spent.values()), dict(spent), sorted(waits))


def check(url: str, nodes: int, seconds: float = 10.0, threads: int = 10) -> tuple[float, float]:
    """Let idle workers do their duties on a real Redis; return its share of a core, and of duties done."""
    with Redis.from_url(url) as redis:
        redis.flushdb()
        workers = [IdleWorker(Redis.from_url(url), f"w{number}") for number in range(nodes)]
        for each in workers:
            each.prepare()
        before, over = look(redis), time.monotonic() + seconds
        counts = [[0, 0] for _ in range(threads)]
        running = [
            threading.Thread(target=_idle, args=(workers[number::threads], nodes, over, counts[number]))
            for number in range(threads)
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        usage = since(redis, before)
        for each in workers:
            each.redis.close()
    done, wanted = (sum(each[i] for each in counts) for i in range(2))
    return usage.share, done / wanted


def _idle(workers: list[IdleWorker], nodes: int, over: float, counts: list[int]) -> None:
    """Carry out the duties of some workers in one thread; counts: duties done, and those that were due."""
    periods = [duty.period_s for duty in duties(Costs(*[0.0] * 10), nodes, Load("idle"))]
    began = time.monotonic()
    counts[1] = int(sum(len(workers) * (over - began) / period for period in periods))
    due = [
        (began + random.uniform(0, period), i, number)
        for i, period in enumerate(periods)
        for number in range(len(workers))
    ]
    heapq.heapify(due)
    while due[0][0] < over:
        moment, i, number = heapq.heappop(due)
        time.sleep(max(0.0, moment - time.monotonic()))
        if time.monotonic() >= over:
            return
        IDLE_DUTIES[i](workers[number])
        counts[0] += 1
        heapq.heappush(due, (moment + periods[i], i, number))


def main() -> None:
    """Measure the costs, then print a table of all fleets and loads, or the check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--check", type=int, help="compare so many idle nodes with the real thing")
    options = parser.parse_args()
    print_machine()
    with running_redis_server() as url:
        costs = measure(url)
        print("Redis µs: " + ", ".join(f"{name} {us:.0f}" for name, us in vars(costs).items()), flush=True)
        if options.check:
            share, pace = check(url, options.check)
            found = simulate(costs, options.check, LOADS[0], pages=0)
            print(f"{options.check} idle workers, {pace:.0%} of their duties carried out")
            print(f"Redis' core: {share:.2%} measured, {found.share * pace:.2%} simulated at that pace")
            return
    header = ["nodes", "load", "jobs/s", "Redis' core", *KINDS, "wait p50 / p99 ms", "Redis needed"]
    print_table(header, [_row(costs, nodes, load) for load in LOADS for nodes in options.nodes])


def _row(costs: Costs, nodes: int, load: Load) -> list[str]:
    found = simulate(costs, nodes, load)
    return [
        f"{nodes}",
        load.name,
        f"{nodes * load.jobs_per_s:,.0f}",
        f"{found.share:.1%}",
        *(f"{found.by_kind.get(kind, 0.0):.1%}" for kind in KINDS),
        "beyond" if found.share > 1 else f"{found.wait(0.5):.1f} / {found.wait(0.99):.1f}",
        f"{max(1, math.ceil(found.share / FULL))}",
    ]


if __name__ == "__main__":
    main()
