"""`import tokenmill`: names that are loaded when they are used."""

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

import tokenmill
from tests.rq_workers import ROOT, Workers, text_of

PACKAGES = ("engine", "jobs", "sandbox", "tokenmill", "worker")
HEAVY = {"engine", "jobs", "pyarrow", "redis", "rq", "sandbox", "torch", "transformers", "worker"}
PACKAGE_OF = {
    "BatchWorker": "worker",
    "Completion": "engine",
    "Engine": "engine",
    "EngineConfig": "engine",
    "EngineError": "engine",
    "JobsError": "jobs",
    "Run": "jobs",
    "SamplingParams": "engine",
    "WorkerError": "worker",
    "response_format": "jobs",
    "run": "jobs",
    "submit": "jobs",
}


def loaded_after(code: str) -> set[str]:
    """Run code in a fresh interpreter; return the top-level names that it has loaded then."""
    program = f"{code}\nimport sys\nprint(*(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


@pytest.mark.processes
def test_the_import_alone_and_its_listing_load_none_of_our_packages_and_nothing_heavy() -> None:
    assert loaded_after("import tokenmill; dir(tokenmill)") & HEAVY == set()


@pytest.mark.processes
def test_a_name_loads_its_own_package_only() -> None:
    loaded = loaded_after("from tokenmill import submit")
    assert "jobs" in loaded
    assert {"engine", "torch", "pyarrow", "worker"} & loaded == set()
    loaded = loaded_after("from tokenmill import EngineConfig, SamplingParams")
    assert "engine" in loaded
    assert {"jobs", "rq", "torch", "worker"} & loaded == set()


@pytest.mark.parametrize("name", PACKAGE_OF)
def test_each_name_is_the_packages_own(name: str) -> None:
    package = importlib.import_module(PACKAGE_OF[name])
    assert getattr(tokenmill, name) is getattr(package, name)


def test_each_name_is_listed() -> None:
    assert set(tokenmill.__all__) == set(PACKAGE_OF)
    assert set(PACKAGE_OF) <= set(dir(tokenmill))


def test_type_checkers_see_the_same_names_from_the_same_packages() -> None:
    tree = ast.parse(Path(tokenmill.__file__).read_text())
    (for_type_checkers, _) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {}
    for statement in for_type_checkers.body:
        assert isinstance(statement, ast.ImportFrom)
        seen |= {alias.name: statement.module for alias in statement.names}
    assert seen == PACKAGE_OF


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tokenmill' has no attribute 'Enginee'"):
        _ = tokenmill.Enginee
    with pytest.raises(ImportError):
        exec("from tokenmill import complete")


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_the_wheel_takes_each_package_by_its_name_and_no_neighbour() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    expected = [pattern for package in PACKAGES for pattern in (package, f"{package}.*")]
    assert setuptools["packages"]["find"]["include"] == expected
    assert setuptools["package-data"]["*"] == ["py.typed"]


def test_rq_starts_the_worker_by_the_name_of_the_face(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    workers = Workers(redis_url, tmp_path)
    queue = Queue("prompts", connection=redis, serializer=JSONSerializer)
    job = queue.enqueue("jobs.complete", "3 March 1987 ->", max_tokens=12, temperature=0)
    model = str(ROOT / "ops" / "demo" / "model")
    small = {"TOKENMILL_TORCH_THREADS": "1", "TOKENMILL_KV_CACHE_BYTES": str(64 * 2**20)}
    try:
        workers.burst(
            queues=("prompts",),
            worker_class="tokenmill.BatchWorker",
            TOKENMILL_MODEL=model,
            **small,
        )
    finally:
        workers.close()
        workers.redis.close()
    assert text_of(workers.result(job)).strip() == "1987-03-03"
