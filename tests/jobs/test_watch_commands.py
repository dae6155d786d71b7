"""`tokenmill status` of all runs, `tokenmill runs` and `tokenmill workers`, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError

from jobs.cli.text_table import ago, left_cut, rate
from jobs.cli.watch_commands import show_or_watch
from jobs.context import JobContext
from tests.jobs.answering import score_parquet, work_off
from tests.jobs.conftest import Invoke

MakeContext = Callable[[], JobContext]


def test_status_without_a_run_shows_all_of_them(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    assert "no run" in invoke("status").stdout
    assert json.loads(invoke("status", "--json").stdout) == []
    done = score_parquet(make_context(), str(source), str(tmp_path / "one"))["run"]
    work_off(redis, make_context)
    moving = score_parquet(make_context(), str(source), str(tmp_path / "two\x1b[2J"))["run"]
    heads, first, second = invoke("status").stdout.splitlines()
    assert heads.split() == [
        "RUN",
        "STATE",
        "ROWS",
        "ERRORS",
        "SHARDS",
        "ROWS/S",
        "TOK/S",
        "SUBMITTED",
        "OUTPUT",
    ]
    assert first.split()[:5] == [moving, "running", "0/5", "0", "0/1"]
    assert first.endswith(r"two\x1b[2J")
    assert second.split()[:5] == [done, "finished", "5/5", "1", "1/1"]
    assert first.index("running") == second.index("finished") == heads.index("STATE")
    told = json.loads(invoke("runs", "--json").stdout)
    assert [each["run"] for each in told] == [moving, done]
    assert told == json.loads(invoke("status", "--json").stdout)
    assert [each["run"] for each in json.loads(invoke("runs", "--state", "finished", "--json").stdout)] == [
        done
    ]
    assert invoke("runs", "--limit", 1).stdout.count("\n") == 2
    assert "is not one of" in invoke("runs", "--state", "gone").stderr


def test_status_of_one_run_is_json_too_also_where_redis_lost_it(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    work_off(redis, make_context)
    told = json.loads(invoke("status", tmp_path / "out", "--json").stdout)
    assert (told["run"], told["state"], told["rows_done"]) == (run, "finished", 5)
    assert told["reasons"] == [{"text": "prompt is null", "rows": 1, "examples": [4]}]
    redis.flushall()
    told = json.loads(invoke("status", tmp_path / "out", "--json").stdout)
    assert (told["run"], told["state"], told["rows"], told["errors"]) == (run, "finished", 5, 1)
    assert invoke("status", run, "--json").exit_code == 1
    assert "--wait" in invoke("status", run, "--watch").stderr


def test_workers_are_listed_with_what_they_serve_and_hold(invoke: Invoke, redis: Redis) -> None:
    assert "no worker" in invoke("workers").stdout
    redis.sadd("rq:workers", "rq:worker:w1", "rq:worker:w2", "rq:worker:stock")
    sample = {
        "state": "draining",
        "model": "q54m",
        "dtype": "bfloat16",
        "version": "0.1.0",
        "queues": ["high", "bulk"],
        "held": {"bulk": 3},
        "num_requests_running": 7,
        "max_num_seqs": 64,
    }
    redis.set("tokenmill:worker:w1", json.dumps(sample), ex=3600)
    redis.set("tokenmill:worker:w2", json.dumps({**sample, "model": "\x1b[2J"}), ex=3500)
    _, first, second = invoke("workers").stdout.splitlines()
    assert first.split() == [
        *("w1", "draining", "q54m", "bfloat16", "0.1.0", "high", "bulk", "bulk", "3", "7/64", "0", "0%"),
        *(first.split()[-2:]),
    ]
    assert second.split()[:3] == ["w2", "silent", r"\x1b[2J"]
    assert second.split()[7:11] == ["-"] * 4, "nobody knows what it still holds"
    one, two = json.loads(invoke("workers", "--json").stdout)
    assert (one["name"], one["draining"], one["held"]) == ("w1", True, {"bulk": 3})
    assert (two["name"], two["silent"], two["held"]) == ("w2", True, {"bulk": 3})


def test_a_workers_name_is_shown_as_a_terminal_may_have_it(redis: Redis, invoke: Invoke) -> None:
    name = "w\x1b]0;title\x07" + "w" * 9999
    redis.sadd("rq:workers", f"rq:worker:{name}")
    redis.set(f"tokenmill:worker:{name}", json.dumps({"model": "m"}), ex=3600)
    _, line = invoke("workers").stdout.splitlines()
    assert line.startswith(r"w\x1b]0;title\x07w")
    assert len(line) < 500


def test_a_table_is_shown_anew_until_it_is_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    looks = iter(["one", ConnectionError("gone"), "two"])

    def show() -> str:
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    def sleep(seconds: float) -> None:
        turns.append(seconds)
        if len(turns) > 2:
            raise KeyboardInterrupt

    turns: list[float] = []
    show_or_watch(show, True, sleep)
    assert capsys.readouterr().out == "one\nno answer from Redis (gone); still trying\ntwo\n"


def test_numbers_and_times_are_short() -> None:
    assert [rate(each) for each in (None, 0.26, 9.94, 1234.5)] == ["-", "0.3", "9.9", "1234"]
    assert [ago(each) for each in (None, -3, 59, 119, 7000, 10**5, 10**6)] == [
        *("-", "0 s", "59 s", "119 s", "117 min", "28 h", "12 d"),
    ]
    assert (left_cut("/a/long/path", 8), left_cut("/a", 8)) == (".../path"[:8], "/a")
