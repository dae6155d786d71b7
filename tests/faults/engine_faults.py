"""What hits workers that run the real engine on the demo model: too small a KV pool, and ranks that die."""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rq import Queue
from rq.serializers import JSONSerializer

from tests.faults.harness import Harness
from tests.forking import FORK
from tests.rq_workers import ROOT

MODEL = ROOT / "ops" / "demo" / "model"
BLOCK_BYTES = 4 * 2 * 16 * 2 * 32 * 4  # layers, K and V, tokens, KV heads, head_dim, float32
SMALL_POOL = 16 * BLOCK_BYTES  # of 8 slots with 5 blocks each
AMPLE_POOL = 256 * BLOCK_BYTES
START_S = 60.0
GREEDY: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}


def kv_exhaustion(faults: Harness, count: int) -> None:
    """SIGKILL of workers whose KV pool holds a third of their batch, while they preempt all the time."""
    plan = {"model": MODEL, "kv_cache_bytes": SMALL_POOL}
    for _ in range(count):
        _ask(faults)
        name = faults.start(**plan)
        if not _wait(lambda name=name: _stat(faults, name, "num_preemptions")):
            faults.wrong(f"{name} has not preempted anything: {faults.plan_of(name).log.read_text()[-2000:]}")
        faults.a_moment(0.3)
        faults.end(name)
        faults.count("SIGKILL while KV memory is exhausted")
    faults.settle("KV exhausted", **plan)


def rank_kills(faults: Harness, count: int) -> None:
    """SIGKILL of one of two tensor-parallel ranks: the worker ends with an error, another redoes its jobs."""
    for _ in range(count):
        _ask(faults)
        name = faults.start(model=MODEL, kv_cache_bytes=AMPLE_POOL, ranks=2)
        if not _wait(faults.plan_of(name).has_work.exists):
            faults.wrong(f"{name} has not begun: {faults.plan_of(name).log.read_text()[-2000:]}")
        ranks = _processes_below(faults.pid_of(name))
        faults.a_moment(0.3)
        if len(ranks) != 2:
            faults.wrong(f"{name} has {len(ranks)} ranks: {faults.plan_of(name).log.read_text()[-2000:]}")
        else:
            with suppress(
                psutil.NoSuchProcess
            ):  # the worker has left meanwhile, and what that means is below
                faults.rng.choice(ranks).kill()
        faults.count("SIGKILL of a tensor-parallel rank")
        if not _wait(lambda name=name: not faults.is_alive(name)):
            faults.wrong(f"{name} goes on without its rank")
        if faults.end(name) in (0, -signal.SIGKILL):
            faults.wrong(f"{name} ended well without its rank")
        if psutil.wait_procs(ranks, timeout=5)[1]:
            faults.wrong(f"{name} has left a rank behind")
    faults.settle("rank killed", model=MODEL, kv_cache_bytes=AMPLE_POOL)


def _processes_below(pid: int) -> list[psutil.Process]:
    """Those that a process has started, none if it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _ask(faults: Harness) -> None:
    """Enqueue jobs whose answers an undisturbed engine has given before."""
    queue = Queue("bulk", connection=faults.redis, serializer=JSONSerializer)
    for prompt, answer in _answers(faults).items():
        job = queue.enqueue("jobs.complete", prompt, **GREEDY, result_ttl=-1, failure_ttl=-1, job_timeout=-1)
        faults.ledger.expect_job(job.id, answer)


def _answers(faults: Harness) -> dict[str, str]:
    path = faults.folder / "answers.json"
    if not path.exists():
        process = FORK.Process(target=_generate, args=(path,), daemon=True)
        process.start()
        process.join()
    return dict(json.loads(path.read_text()))


def _generate(path: Path) -> None:
    """In a process of its own: the harness loads no torch."""
    from engine import Engine, EngineConfig, SamplingParams

    prompts = [f"{day}. March {1990 + day} =>" for day in range(1, 17)]
    config = EngineConfig(str(MODEL), dtype="float32", device="cpu", kv_cache_bytes=AMPLE_POOL)
    with Engine(config) as engine:
        completions = engine.generate(prompts, SamplingParams(**GREEDY))
    answers = {prompt: each.text for prompt, each in zip(prompts, completions, strict=True)}
    path.write_text(json.dumps(answers))


def _stat(faults: Harness, name: str, counter: str) -> int:
    return int(json.loads(faults.redis.get(f"tokenmill:worker:{name}") or b"{}").get(counter, 0))


def _wait(condition: Any) -> bool:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
