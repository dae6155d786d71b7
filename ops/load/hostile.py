"""One tenant's small prompts beside another's attack: none lost, none with a death, and hardly later.

The engine is the real one, on the CPU, with the demo model; one worker, which is started again where it ends.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from rq.job import Job
from rq.results import Result
from rq.utils import str_to_date

from jobs.context.shard_bytes import DEFAULT_BYTES
from ops.load.attacks import ATTACKS, LANE, Attack, give_text
from ops.load.report import Report
from ops.load.site import MIB, Site, enqueue_prompts, site
from ops.load.stub_engine import peak_rss_bytes
from ops.load.urgent import MODEL, quantile

LANES = ("high", LANE)
MAX_GAP_S = 0.2
"""Between two prompts of the stream, which come at random times."""

MAX_RATIO, MAX_MORE_S = 2.0, 1.0
"""The time of a prompt beside an attack, at its p99: so many times that without, and so much more."""

MAX_GROWTH_MIB = 2 * DEFAULT_BYTES // MIB
"""Of the worker's memory by an attack: what its shards may hold in prompts, and as much to read files; the
other attacks' jobs and results have to do with as much."""

MAX_ATTACK_S = 240.0
"""After which an attack that has not ended counts as one that does not."""
LAST_ANSWER_S = 90.0

MODEL_TOKENS = 1 << 15
"""Of a sequence, at most; as many as 64 MiB of KV hold."""

SETTINGS = {
    "worker_class": "worker.BatchWorker",
    "TOKENMILL_DEVICE": "cpu",
    "TOKENMILL_DTYPE": "float32",
    "TOKENMILL_TORCH_THREADS": "1",
    "TOKENMILL_KV_CACHE_BYTES": "64MiB",
    "TOKENMILL_LEASE_S": "10",
    "TOKENMILL_ALLOWED_FUNCTIONS": f"{give_text.__module__}.{give_text.__name__}",
}


@dataclass
class Keeper:
    """Starts the worker again where it has ended, as a supervisor does. exits: how often. peak_rss: bytes."""

    place: Site
    model: Path
    exits: int = 0
    peak_rss: int = 0
    started: int = 0

    def start(self) -> None:
        self.started += 1
        data = {"TOKENMILL_DATA_ROOTS": str(self.place.folder), "TOKENMILL_MODEL": str(self.model)}
        arguments = ("--job-monitoring-interval", "1", "--maintenance-interval", "2")
        self.place.start(f"w{self.started}", *arguments, settings={**SETTINGS, **data})

    def look(self) -> None:
        """Note the worker's memory; start the next one if it is gone."""
        process = self.place.processes()[-1]
        self.peak_rss = max(self.peak_rss, peak_rss_bytes(process.pid))
        if process.poll() is not None:
            self.exits += 1
            self.start()


@dataclass
class Stream:
    """Prompts of one lane, and the seconds from enqueueing to the end of each that was answered."""

    lane: str
    ids: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lost: int = 0
    with_deaths: int = 0


def hostile(
    attacks: Sequence[Attack] = ATTACKS,
    seconds: float = 20.0,
    rounds: int = 2,
    scale: float = 1.0,
    apart: bool = True,
    seed: int = 1,
) -> Report:
    """Ask a steady stream of prompts, by turns without and beside each attack.

    seconds: each stretch without an attack, and with one at least; it lasts until the attack is over.
    scale: of the attacks' sizes. apart: a server and a worker of its own for each attack.
    """
    report = Report(f"hostile: {rounds} rounds of {seconds:g} s, attacks of {scale:g} times their size")
    rng = Random(seed)
    for group in [[attack] for attack in attacks] if apart else [list(attacks)]:
        with site() as place:
            keeper = Keeper(place, _roomy_model(place.folder / "model"))
            keeper.start()
            place.wait_until_ready()
            for attack in group:
                _besiege(place, keeper, report, attack, seconds, rounds, scale, rng)
    return report


def _roomy_model(folder: Path) -> Path:
    """Copy the demo model, as one that takes prompts as long as its pool: it refuses few by their length."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MODEL_TOKENS}))
    return folder


def _besiege(
    place: Site,
    keeper: Keeper,
    report: Report,
    attack: Attack,
    seconds: float,
    rounds: int,
    scale: float,
    rng: Random,
) -> None:
    alone, beside = Stream(attack.lane), Stream(attack.lane)
    launch, exits, attack_s = attack.prepare(place, scale), keeper.exits, 0.0
    first = Stream(attack.lane)  # for whatever happens once
    _ask(place, keeper, first, 1.0, lambda: True, rng)
    _await(place, keeper, first)
    for turn in range(rounds):
        _ask(place, keeper, alone, seconds, lambda: True, rng)
        _await(place, keeper, alone)
        if turn == 0:
            calm_rss = keeper.peak_rss
        launch()
        attack_s = max(attack_s, _ask(place, keeper, beside, seconds, lambda: _is_over(place, beside), rng))
        _await(place, keeper, beside)
        if attack_s > MAX_ATTACK_S:
            break
    for stream in (alone, beside):
        _judge(place, stream)
    _tell(report, attack, alone, beside)
    report.equal(f"{attack.name}: ends of the worker", keeper.exits - exits, 0)
    growth = (keeper.peak_rss - calm_rss) / MIB
    report.tell(f"{attack.name}: peak RSS before the attack, MiB", calm_rss / MIB)
    report.at_most(f"{attack.name}: and more with it, MiB", growth, MAX_GROWTH_MIB, measured=True)
    report.at_most(f"{attack.name}: seconds until the attack is over", attack_s, MAX_ATTACK_S, measured=True)


def _tell(report: Report, attack: Attack, alone: Stream, beside: Stream) -> None:
    report.at_least(f"{attack.name}: prompts beside it, on {attack.lane}", len(beside.ids), 1)
    report.equal(f"{attack.name}: prompts lost", beside.lost + alone.lost, 0)
    report.equal(f"{attack.name}: prompts with a death", beside.with_deaths + alone.with_deaths, 0)
    for name, stream in (("without", alone), ("with", beside)):
        figures = ", ".join(f"{quantile(stream.seconds, share):.3f}" for share in (0.5, 0.99, 1.0))
        report.tell(f"{attack.name}: s of a prompt {name}: p50, p99, most", figures)
    most = MAX_RATIO * quantile(alone.seconds, 0.99) + MAX_MORE_S
    report.at_most(f"{attack.name}: p99 with it, s", quantile(beside.seconds, 0.99), most, measured=True)


def _ask(
    place: Site,
    keeper: Keeper,
    stream: Stream,
    seconds: float,
    is_over: Callable[[], bool],
    rng: Random,
) -> float:
    """Ask prompts for so many seconds, and until `is_over`; return how long that took."""
    started = time.monotonic()
    sampling = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
    while (passed := time.monotonic() - started) < seconds or not is_over():
        if passed > MAX_ATTACK_S:
            break
        prompt = f"the {len(stream.ids)}th of May {rng.randrange(1900, 2100)}"
        options = {"result_ttl": 3600, "failure_ttl": 3600}
        stream.ids += enqueue_prompts(place.queue(stream.lane), [prompt], sampling, **options)
        keeper.look()
        time.sleep(rng.uniform(0, MAX_GAP_S))
    return passed


def _is_over(place: Site, stream: Stream) -> bool:
    """Whether nothing but the stream waits or runs."""
    with place.redis.pipeline(transaction=False) as pipe:
        pipe.lrange(f"rq:queue:{LANE}", 0, -1)
        pipe.zrange(f"rq:wip:{LANE}", 0, -1)
        waiting, running = pipe.execute()
    ids = {each.decode() for each in waiting} | {each.decode().rpartition(":")[0] for each in running}
    return ids <= set(stream.ids)


def _await(place: Site, keeper: Keeper, stream: Stream) -> None:
    """Wait for the last answers, but not for ever."""
    deadline = time.monotonic() + LAST_ANSWER_S
    left = list(stream.ids)
    while left and time.monotonic() < deadline:
        keeper.look()
        left = [job_id for job_id in left if not place.redis.exists(f"rq:results:{job_id}")]
        time.sleep(0.05)


def _judge(place: Site, stream: Stream) -> None:
    """Count the prompts without an answer, and those with which a worker died; note what others took."""
    for job_id in stream.ids:
        job = Job(job_id, connection=place.redis, serializer="json")
        result = job.latest_result()
        enqueued, ended = place.redis.hmget(job.key, "enqueued_at", "ended_at")
        stream.with_deaths += place.redis.exists(f"tokenmill:deaths:{job.id}")
        if result is None or result.type is not Result.Type.SUCCESSFUL or not enqueued or not ended:
            stream.lost += 1
            stream.seconds.append(float("inf"))
        else:
            took = str_to_date(ended) - str_to_date(enqueued)
            stream.seconds.append(took.total_seconds())
