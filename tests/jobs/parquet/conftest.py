from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig
from tests.engine.checkpoints import SHAPES, make_checkpoint, pool_bytes
from tests.jobs.answering import opened_task
from tests.jobs.conftest import MakeContext
from tests.jobs.local_runs import Runs
from worker.stock_worker import drive

#: Runs a job with a real engine to its end, as RQ's own worker does, and returns what it gives.
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), SHAPES[0])


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    values: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_bytes": pool_bytes(SHAPES[0], 64),
        "max_model_len": 200,
    }
    with Engine(EngineConfig(str(checkpoint), **values)) as built:
        yield built


@pytest.fixture
def ask(engine: Engine, make_context: MakeContext) -> Ask:
    def run(name: str, *args: Any, **kwargs: Any) -> Any:
        task = opened_task(make_context(), name, args, kwargs)
        try:
            drive(task, engine)
            return task.result()
        finally:
            task.close()

    return run


@pytest.fixture
def compute(runs: Runs, ask: Ask) -> Callable[[], None]:
    """Runs every shard that waits with a real engine."""

    def run() -> None:
        for job in runs.jobs:
            ask(job.func_name, *job.args, **job.kwargs)
            job.delete()

    return run
