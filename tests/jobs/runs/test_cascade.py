"""Rows whose labels have a low margin are asked again of a larger model, in one run with one output."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import log
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.cli.status_text import status_text
from jobs.common.keys import MODEL_FIELD, fleet_key, served_key, worker_key
from jobs.context import JobContext
from jobs.context.served_model import ServedModel
from jobs.errors import InvalidJob, KeptAnswersLost, NoSecondModel, RunCancelled
from jobs.parquet.planning.planner import plan_run
from jobs.parquet.shards.shard_journal import ShardJournal
from jobs.runs.control import cancel_run
from jobs.runs.plans.names import job_shard
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.submission import Submission
from jobs.runs.watching.reading import list_runs, read_snapshot
from jobs.runs.watching.snapshot import obstacles
from jobs.tasks import Request
from tests.jobs.answering import (
    MODEL,
    FakeCompletion,
    add_worker,
    fail,
    feed,
    keep,
    opened_task,
    queued_jobs,
    refuse,
    run_task,
    work_off,
)
from tests.jobs.conftest import Invoke
from tests.jobs.killing import Fuse, FusedRedis, FusedStorage, Killed, finish, open_work
from tests.jobs.local_runs import Runs
from tokenmill.dashboard.seen.shards_seen import list_shards

LARGE = ServedModel("large", "fingerprint of large", "float32")
LABELS: dict[str, Any] = {"labels": ["yes", "no"], "prompt_column": "prompt", "rows_per_shard": 4}
CASCADE: dict[str, Any] = {**LABELS, "escalate_below": 0.5, "escalate_to": "large"}
PLAIN: dict[str, Any] = {"escalate_below": None, "escalate_to": None}
ROWS = ["0.9", "0.4", None, "0.1", "0.8", "0.7", "0.45", "0.4", "0.99"]
QUEUES = {"bulk": MODEL, "large": LARGE}


class Site:
    """Runs of two models, of which each has a queue. asked: prompts, by queue."""

    def __init__(self, redis: Redis, runs: Runs) -> None:
        self.redis, self.runs, self.asked = redis, runs, {name: list[str]() for name in QUEUES}
        self.start_workers()
        runs.write(ROWS)

    def start_workers(self) -> None:
        for queue in QUEUES:
            add_worker(self.redis, queue)
            self.redis.hset(f"rq:worker:{queue}", "queues", queue)
            self.serve(queue, [queue])

    def serve(self, worker: str, queues: list[str]) -> None:
        """Write what a worker with the model of its name writes while it serves these queues."""
        model = QUEUES[worker]
        told = {"model": model.name, "models": model.names, "dtype": model.dtype, "queues": queues}
        self.redis.set(worker_key(worker), json.dumps(told))
        self.redis.set(served_key(worker), json.dumps(told))
        for queue in queues:
            self.redis.zadd(fleet_key(queue), {worker: 1.0})

    def answer(self, queue: str) -> Callable[[Request], FakeCompletion]:
        """Return a queue's answers: the first model's have the margin that the prompt says."""

        def answer(request: Request) -> FakeCompletion:
            self.asked[queue].append(str(request.prompt))
            share = (1 + float(str(request.prompt))) / 2 if queue == "bulk" else 0.01
            likelihoods = [SimpleNamespace(logprob=log(each)) for each in (share, 1 - share)]
            return FakeCompletion(num_prompt_tokens=2, loglikelihoods=likelihoods)

        return answer

    def context(self, queue: str) -> JobContext:
        return replace(self.runs.context(), model=QUEUES[queue], queue_name=queue)

    def work(self, *queues: str) -> None:
        for queue in queues or QUEUES:
            work_off(self.redis, lambda queue=queue: self.context(queue), queue, self.answer(queue))

    def score(self, name: str = "out", **arguments: Any) -> pa.Table:
        output = self.runs.output.parent / name
        self.runs.plan(output=output, **{**CASCADE, **arguments})
        self.work()
        assert (output / "_SUCCESS").exists()
        return pq.read_table(output)

    def manifest(self, name: str = "out") -> dict[str, Any]:
        return dict(json.loads((self.runs.output.parent / name / "_manifest.json").read_text()))

    @property
    def waiting(self) -> list[tuple[str, int | None]]:
        """Return the queues and shards of jobs."""
        jobs = ((queue, job.id) for queue in QUEUES for job in queued_jobs(self.redis, queue))
        return [(queue, job_shard(job_id[:16], job_id)) for queue, job_id in jobs]


@pytest.fixture
def site(redis: Redis, runs: Runs) -> Site:
    return Site(redis, runs)


def test_rows_with_low_margins_alone_are_the_second_models(site: Site) -> None:
    first = site.score("first", **PLAIN).to_pylist()
    bound = {"escalate_below": first[6]["margin"]}  # which is not below itself
    site.runs.plan(**{**CASCADE, **bound})
    assert site.waiting == [("bulk", 0), ("bulk", 1), ("bulk", 2)]
    site.work("bulk")
    assert site.waiting == [("large", 0), ("large", 1)]
    found = site.score(**bound).to_pylist()
    assert site.waiting == []
    for prompt, own, old in zip(ROWS, found, first, strict=True):
        is_low = prompt in ("0.4", "0.1")
        assert own.pop("model") == (None if prompt is None else "large" if is_low else "m")
        assert (
            (own["label"], own["margin"]) == ("no", pytest.approx(0.98)) if is_low else own == old
        )
    assert sorted(site.asked["large"]) == ["0.1", "0.4", "0.4"]
    manifest = site.manifest()
    assert (manifest["rows"], manifest["errors"], manifest["rows_escalated"]) == (9, 1, 3)
    assert manifest["model"] == "large, m"
    assert not (site.runs.output / "_journal").exists()
    named = manifest["run"], str(site.runs.output / "_plan.json"), "100%"
    checked = run_task(site.context("bulk"), "jobs.verify_rows", *named, answer=site.answer("bulk"))
    assert (checked["rows_equal"], checked["rows_different"], checked["rows_of_other_models"]) == (
        5,
        0,
        3,
    )


def run_until_killed(site: Site, spec: RunSpec, fuse: Fuse) -> str | None:
    """Plan, then do all jobs, as one process; return at what it was killed."""
    contexts = {
        name: replace(site.context(name), connection=FusedRedis(site.redis, fuse))
        for name in QUEUES
    }
    storage, at = FusedStorage(contexts["bulk"].data_roots, fuse), "plan"
    try:
        plan_run(contexts["bulk"], storage, spec, Submission("bulk"))
        for at, context in contexts.items():
            for job in queued_jobs(site.redis, at):
                work = open_work(
                    context, spec, job.args[2], storage, None if at == "bulk" else "bulk"
                )
                finish(work, journalled=True, answer=site.answer(at))
                job.delete()
    except Killed:
        for context in contexts.values():
            context.files.close_idle()  # as the system does for a process that was killed
        return at
    return None


@pytest.mark.parametrize("stride", [17, pytest.param(5, marks=pytest.mark.long)])
def test_no_kill_point_strands_it(site: Site, stride: int) -> None:
    expected = site.score("calm")
    spec = RunSpec.from_arguments(str(site.runs.source), str(site.runs.output), **CASCADE)
    step = 0
    while (at := run_until_killed(site, spec, Fuse(step))) is not None:
        recovery = step // stride % 3
        if recovery == 0:
            site.redis.flushall()
            site.start_workers()
        if recovery < 2 or at == "plan":
            site.runs.plan(**CASCADE)
        site.work()
        assert pq.read_table(site.runs.output).equals(expected)
        assert (site.manifest()["rows_escalated"], site.waiting) == (4, [])
        shutil.rmtree(site.runs.output)
        site.redis.flushall()
        site.start_workers()
        step += stride
    assert step > 150


@pytest.mark.parametrize(("queue", "num_jobs"), [("bulk", 3), ("large", 2)])
def test_it_is_cancelled_and_resumed_in_each_phase(site: Site, queue: str, num_jobs: int) -> None:
    run = site.runs.plan(**CASCADE)["run"]
    if queue == "large":
        site.work("bulk")
    held, *_ = queued_jobs(site.redis, queue)
    assert cancel_run(site.redis, run).removed == num_jobs
    assert site.waiting == []
    with pytest.raises(RunCancelled):
        run_task(site.context(queue), held.func_name, *held.args, answer=site.answer(queue))
    assert site.runs.plan(**CASCADE)["shards_enqueued"] == num_jobs
    assert site.runs.plan(**CASCADE)["shards_enqueued"] == 0
    site.work()
    assert sorted(site.asked["bulk"]) == sorted(filter(None, ROWS))
    assert site.manifest()["rows_escalated"] == 4
    assert site.runs.plan(**CASCADE)["already_finished"]


def test_an_equal_run_takes_all_answers_and_another_those_that_it_can(site: Site) -> None:
    calm = site.score("calm")
    low = sorted(site.asked["large"])

    def reuse(name: str, *of: str, **arguments: Any) -> dict[str, list[str]]:
        for prompts in site.asked.values():
            prompts.clear()
        found = site.score(
            name, reuse=[str(site.runs.output.parent / each) for each in of], **arguments
        )
        assert arguments or found.equals(calm)
        return {queue: sorted(prompts) for queue, prompts in site.asked.items()}

    assert reuse("equal", "calm") == {"bulk": [], "large": []}
    assert site.manifest("equal")["rows_reused"] == 8
    assert reuse("plain", "calm", **PLAIN) == {"bulk": low, "large": []}
    assert reuse("of plain", "plain") == {"bulk": [], "large": low}
    assert reuse("of both", "plain", "calm") == {"bulk": [], "large": []}
    assert reuse("higher", "calm", escalate_below=0.75) == {"bulk": [], "large": ["0.7"]}
    assert reuse("lower", "higher") == {"bulk": sorted([*low, "0.7"]), "large": low}, (
        "whose margins are not known"
    )
    site.runs.plan(output=site.runs.output.parent / "open", **CASCADE)
    site.work("bulk")
    for job in queued_jobs(site.redis, "large"):
        job.delete()
    assert reuse("of open", "open") == {"bulk": low, "large": low}


def test_answers_of_both_models_for_one_row_are_not_taken_for_each_other(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = site.score("calm")
    monkeypatch.setattr(ShardJournal, "remove", lambda journal: None)  # killed before it
    site.runs.plan(**CASCADE)
    for queue in QUEUES:
        for job in queued_jobs(site.redis, queue):
            task = opened_task(site.context(queue), job.func_name, job.args, job.kwargs)
            feed(task, site.answer(queue))
            keep(task, {})
            if queue == "bulk":
                task.result()
            task.close()
            job.delete()
    assert site.score("new", reuse=[str(site.runs.output)]).equals(expected)


def test_what_holds_it_up_is_told_and_mended(site: Site) -> None:
    run = site.runs.plan(**CASCADE)["run"]
    site.work("bulk")
    site.redis.delete("rq:worker:large")
    snapshot = read_snapshot(site.redis, run)
    assert (snapshot.state, snapshot.queued, snapshot.gone, snapshot.is_idle) == (
        "running",
        2,
        0,
        False,
    )
    (told,) = obstacles(site.redis, snapshot)
    assert "no worker on queue 'large' serves model large (float32, fingerpr)" in told
    site.start_workers()
    assert obstacles(site.redis, read_snapshot(site.redis, run)) == []
    assert [each.state for each in list_shards(site.redis, run)] == ["queued", "queued", "done"]
    lost, emptied = queued_jobs(site.redis, "large")
    kept = site.runs.output / "_journal" / "_kept.00000.answers"
    kept.unlink()
    with pytest.raises(KeptAnswersLost, match=r"_kept\.00000\.answers.* submit the run again"):
        run_task(site.context("large"), lost.func_name, *lost.args)
    fail(site.redis, lost, "they are lost")
    emptied.delete()
    snapshot = read_snapshot(site.redis, run)
    assert (snapshot.state, snapshot.failed_jobs, snapshot.gone) == ("failed", (lost.id,), 1)
    assert [each.state for each in list_shards(site.redis, run)] == ["failed", "gone", "done"]
    assert [len(each.failed_jobs) for each in list_runs(site.redis)] == [1]
    site.score()
    (listed,) = list_runs(site.redis)
    assert site.manifest()["rows_escalated"] == read_snapshot(site.redis, run).rows_escalated == 4
    assert (listed.state, listed.rows_escalated) == ("finished", 4)
    assert "again    4 rows, by the second model" in status_text(listed)


def test_a_run_that_is_stopped_leaves_neither_queue_a_job(site: Site, invoke: Invoke) -> None:
    asked = (
        "--labels",
        "yes,no",
        "--rows-per-shard",
        4,
        "--escalate-below",
        0.5,
        "--escalate-to",
        "large",
    )
    submitted = invoke("submit", site.runs.source, site.runs.output, *asked, "--max-errors", 1)
    assert submitted.exit_code == 0, submitted.output
    site.work("bulk")  # the planning
    first, second, _ = queued_jobs(site.redis)
    for job in (first, second):
        run_task(site.context("bulk"), job.func_name, *job.args, answer=site.answer("bulk"))
        job.delete()
    again, _ = queued_jobs(site.redis, "large")
    run_task(
        site.context("large"),
        again.func_name,
        *again.args,
        answer=lambda request: refuse("too long"),
    )
    assert site.waiting == [("large", 0)]  # the one that ran


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"labels": None}, "escalate_below is for labels of one prompt"),
        ({"escalate_to": None}, "give escalate_to or escalate_model too"),
        ({"escalate_below": None}, "give escalate_below too"),
        ({"escalate_below": 1.5}, "escalate_below is 1.5, expected a number above 0, at most 1"),
    ],
)
def test_what_makes_no_cascade_is_refused(site: Site, wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidJob, match=reason):
        site.runs.plan(**{**CASCADE, **wrong})


def test_another_model_has_to_be_there(site: Site) -> None:
    for wrong in ({"escalate_to": "bulk"}, {"escalate_model": "huge"}):
        with pytest.raises(
            NoSecondModel,
            match=r"on queue '(bulk|large)' serve none as a second model, expected exactly one beside .* model m \(",
        ):
            site.runs.plan(**{**CASCADE, **wrong})
    assert set(site.score(escalate_model="large").column("model").to_pylist()) == {
        "m",
        "large",
        None,
    }


def test_an_invented_worker_neither_pins_nor_hinders_a_second_model(site: Site) -> None:
    for name, queues in (("invented", "large"), ("large", "large")):
        site.redis.sadd("rq:workers", f"rq:worker:{name}")
        site.redis.hset(f"rq:worker:{name}", "queues", queues)
        told = {
            "model": "evil",
            "models": ["fingerprint of evil", "evil"],
            "dtype": "float32",
            "queues": [queues],
        }
        site.redis.set(worker_key(name), json.dumps(told))
    assert set(site.score().column("model").to_pylist()) == {"m", "large", None}


def test_both_models_may_serve_one_queue(site: Site) -> None:
    calm = site.score("calm")
    site.redis.hset("rq:worker:large", "queues", "bulk")
    site.serve("large", ["bulk"])
    run = site.runs.plan(**{**CASCADE, "escalate_to": None, "escalate_model": "large"})["run"]
    site.work("bulk")
    jobs = queued_jobs(site.redis)
    assert [site.redis.hget(job.key, MODEL_FIELD) for job in jobs] == [
        LARGE.fingerprint.encode()
    ] * 2
    assert obstacles(site.redis, read_snapshot(site.redis, run)) == []
    assert cancel_run(site.redis, run).removed == 2
    assert (
        site.runs.plan(**{**CASCADE, "escalate_to": None, "escalate_model": "large"})[
            "shards_enqueued"
        ]
        == 2
    )
    site.work("bulk")
    work_off(
        site.redis,
        lambda: replace(site.context("large"), queue_name="bulk"),
        answer=site.answer("large"),
    )
    assert pq.read_table(site.runs.output).equals(calm)
