"""The command `tokenmill doctor`: what it prints, and its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click.testing
import pytest
from redis import Redis

from jobs.cli import main
from tests.doctor.conftest import set_up
from tests.doctor.test_worker_faults import MODEL
from tests.rq_workers import ROOT


def run(url: str, *arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, ["--url", url, "doctor", *arguments])


def test_a_worker_whose_set_up_is_right_has_no_fault(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENMILL_MODEL", str(MODEL))
    result = run(redis_url, "--json", "--role", "worker")
    told = json.loads(result.stdout)
    assert [each for each in told["findings"] if each["level"] == "fault"] == []
    assert (result.exit_code, told["faults"], told["role"]) == (0, 0, "worker")
    subjects = {each["subject"] for each in told["findings"]}
    assert subjects >= {
        "redis",
        "permissions",
        "settings",
        "installation",
        "model",
        "memory",
        "gpu",
        "files",
    }
    assert subjects >= {"kernels", "tokenizer"}
    assert list(tmp_path.iterdir()) == []
    assert redis.dbsize() == 0

    set_up(redis, {"maxmemory-policy": "allkeys-lru"})
    monkeypatch.setenv("TOKENMILL_MODEL", "/nowhere")
    monkeypatch.setenv("TOKENMILL_DATA_ROOTS", "/nowhere-either")
    result = run(redis_url, "--role", "worker")
    assert result.exit_code == 1
    for line in ("fault    redis memory", "fault    model", "fault    files", "fault    settings"):
        assert line in result.stdout
    assert "-> redis-cli CONFIG SET maxmemory-policy noeviction" in result.stdout


def test_the_dashboard_is_looked_at(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(redis_url, "--role", "dashboard").exit_code == 0
    monkeypatch.setenv("TOKENMILL_DASHBOARD_TOKEN", "short")
    result = run(redis_url, "--role", "dashboard")
    assert (result.exit_code, "TOKENMILL_DASHBOARD_TOKEN has 5 characters" in result.stdout) == (
        1,
        True,
    )


@pytest.mark.parametrize(
    ("worker_class", "is_warned_of"),
    [("worker.BatchWorker", False), ("tokenmill.BatchWorker", False), ("rq.SimpleWorker", True)],
)
def test_either_name_of_the_worker_may_be_rqs_default(
    redis: Redis,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    worker_class: str,
    is_warned_of: bool,
) -> None:
    monkeypatch.setenv("RQ_WORKER_CLASS", worker_class)
    result = run(redis_url, "--role", "producer")
    assert ("RQ_WORKER_CLASS" in result.stdout) == is_warned_of


def test_a_producer_needs_nothing_more_and_a_password_is_never_printed(tmp_path: Path) -> None:
    """As a command, without what only workers install."""
    blocked = dict.fromkeys(("torch", "pyarrow", "pydantic_settings", "dotenv"))
    code = f"import sys; sys.modules.update({blocked}); from jobs.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--role", "producer"],
        env={
            **os.environ,
            "RQ_REDIS_URL": "redis://me:s%2Fecret@127.0.0.1:1/0",
            "PYTHONPATH": str(ROOT),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 1, shown
    assert "fault    redis" in shown
    assert "redis://127.0.0.1:1/0 does not answer" in shown
    assert "faults: 1," in shown
    assert "s%2Fecret" not in shown
    assert "s/ecret" not in shown
