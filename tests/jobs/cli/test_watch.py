"""Lists of runs and workers, for people and for programs."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError

from jobs.cli import watch_commands
from jobs.cli.watch_commands import show_or_watch
from jobs.common.keys import run_key
from jobs.runs.watching.reading import list_runs, read_planned, run_reasons
from tests.jobs.answering import fail
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs
from tests.jobs.runs.test_verify import drawn
from tokenmill.dashboard.seen.shards_seen import list_shards


def test_status_without_a_run_shows_all_of_them(
    runs: Runs, invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    assert "no run" in invoke("status").stdout
    assert json.loads(invoke("status", "--json").stdout) == []
    done = runs.plan(source, tmp_path / "one")["run"]
    runs.work()
    moving = runs.plan(source, tmp_path / "two\x1b[2J")["run"]
    heads, first, second = invoke("status").stdout.splitlines()
    columns = ["RUN", "STATE", "ROWS", "ERRORS", "ROWS/S", "TOK/S", "LEFT", "SUBMITTED", "OUTPUT"]
    assert heads.split() == columns
    assert first.split()[:7] == [moving, "running", "0/5", "0", "-", "-", "-"]
    assert first.endswith(r"two\x1b[2J")
    assert second.split()[:4] == [done, "finished", "5/5", "1"]
    assert first.index("running") == second.index("finished") == heads.index("STATE")
    told = json.loads(invoke("runs", "--json").stdout)
    assert [each["run"] for each in told] == [moving, done]
    assert told == json.loads(invoke("status", "--json").stdout)
    assert invoke("runs", "--state", "finished").stdout.splitlines()[1].startswith(done)


def test_status_of_one_run_is_json_too_also_where_redis_lost_it(
    runs: Runs, invoke: Invoke, redis: Redis, source: Path
) -> None:
    run = runs.plan(source)["run"]
    runs.work()
    told = json.loads(invoke("status", runs.output, "--json").stdout)
    assert (told["run"], told["state"], told["rows_done"]) == (run, "finished", 5)
    assert told["reasons"] == [{"text": "prompt is null", "rows": 1, "examples": [4]}]
    redis.flushall()
    told = json.loads(invoke("status", runs.output, "--json").stdout)
    assert (told["run"], told["state"], told["rows"], told["errors"]) == (run, "finished", 5, 1)
    assert invoke("status", run, "--json").exit_code == 1


def test_one_run_is_watched_until_it_has_ended(
    runs: Runs, invoke: Invoke, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.plan(source)["run"]
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        runs.work()

    monkeypatch.setattr(watch_commands, "show_or_watch", partial(show_or_watch, sleep=sleep))
    shown = invoke("status", run, "--watch").stdout
    assert [line for line in shown.splitlines() if line.startswith("run ")] == [
        f"run {run}: running",
        f"run {run}: finished",
    ]
    assert len(sleeps) == 1, "a run that has ended is shown once more, and no longer"


def test_workers_are_listed_with_what_they_serve_and_hold(invoke: Invoke, redis: Redis) -> None:
    assert "no worker" in invoke("workers").stdout
    redis.sadd("rq:workers", "rq:worker:w1", "rq:worker:w2", "rq:worker:stock")
    sample = {"state": "draining", "model": "q54m", "dtype": "bfloat16", "version": "0.1.0"}
    sample |= {"queues": ["high", "bulk"], "held": {"bulk": 3}}
    sample |= {"num_requests_running": 7, "max_num_seqs": 64, "fingerprint": "0123456789ab"}
    sample |= {"host": "gpu1", "pid": 42, "memory_bytes": 5 << 30, "commit": "c0ffee1234"}
    sample |= {"model_source": "/models/q54m", "started_at": 1e9, "updated_at": 1e9 + 7200}
    redis.set("tokenmill:worker:w1", json.dumps(sample), ex=3600)
    redis.set("tokenmill:worker:w2", json.dumps({**sample, "model": "m"}), ex=3500)
    heads, first, second = invoke("workers").stdout.splitlines()
    assert heads.split() == [
        *("WORKER", "STATE", "MODEL", "FINGERPRINT", "VERSION", "HOST", "PID", "UP", "MEMORY"),
        *("LANES", "HOLDS", "BATCH", "WAITING", "KV", "SEEN", "PATH"),
    ]
    cells = re.split("  +", first)
    assert [*cells[:-2], cells[-1]] == [
        *("w1", "draining", "q54m", "01234567", "0.1.0 (c0ffee12)", "gpu1", "42", "2 h 0 min"),
        *("5.0 GiB", "high bulk", "bulk 3", "7/64", "0", "0%", "/models/q54m"),
    ]
    cells = re.split("  +", second)
    assert [*cells[:-2], cells[-1]] == [
        *("w2", "silent", "m", "01234567", "0.1.0 (c0ffee12)", "gpu1", "42", "-"),
        *("-", "high bulk", "-", "-", "-", "-", "/models/q54m"),
    ], "nobody knows what a silent one still holds"
    one, two = json.loads(invoke("workers", "--json").stdout)
    assert (one["name"], one["draining"], one["held"]) == ("w1", True, {"bulk": 3})
    assert (two["name"], two["silent"], two["held"]) == ("w2", True, {"bulk": 3})


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


def test_a_warning_stands_above_each_text_of_a_cleared_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("click.clear", lambda: print("cleared"))
    is_over = iter([False, True])
    show_or_watch(
        lambda: "text", True, lambda seconds: None, lambda: next(is_over), lambda: print("full")
    )
    assert capsys.readouterr().out.split() == ["full", "text", "cleared", "full", "text"]


def commands(redis: Redis) -> int:
    found = redis.info("commandstats")
    return sum(each["calls"] for name, each in found.items() if name != "cmdstat_info")


def test_each_run_has_a_line_with_its_state_counts_and_rates(
    runs: Runs, invoke: Invoke, redis: Redis, source: Path, tmp_path: Path
) -> None:
    done = runs.plan(source, tmp_path / "one", rows_per_shard=2)["run"]
    runs.work()
    moving = runs.plan(source, tmp_path / "two", rows_per_shard=1)["run"]
    first, started, failed, *_ = runs.jobs
    runs.run(first)
    first.delete()
    redis.lrem("rq:queue:bulk", 1, started.id)
    redis.hset(
        started.key,
        mapping={"status": "started", "tokenmill_progress": '{"rows_done": 1, "tokens": 9}'},
    )
    redis.zadd("rq:wip:bulk", {f"{started.id}:abc": 9e12})
    fail(redis, failed, "jobs.errors.InputChanged: it changed")
    waiting = invoke("submit", source, tmp_path / "three").stdout.strip()
    found = {each.run: each for each in list_runs(redis)}
    assert list(found) == [waiting, moving, done]  # the last submission first
    assert [each.state for each in found.values()] == ["planning", "running", "finished"]
    one = found[done]
    assert (one.rows, one.rows_done, one.errors, one.shards, one.shards_done) == (5, 5, 1, 3, 3)
    assert (one.tokens, one.prompt_tokens, one.model) == (4, 4, "m (float32, fingerpr)")
    assert one.worked_s
    assert one.rows_per_s == pytest.approx(5 / one.worked_s)
    two = found[moving]
    assert (two.rows_done, two.tokens, two.shards_done, two.shards_started) == (2, 10, 1, 1)
    assert (two.shards_failed, two.is_active) == (1, True)
    assert two.tokens_per_s
    assert (found[waiting].rows, found[waiting].rows_per_s) == (None, None)
    assert [each.run for each in list_runs(redis, states=["finished"])] == [done]
    assert [each.run for each in list_runs(redis, limit=1)] == [waiting]
    for each in found.values():
        detail = read_planned(redis, each.run)
        assert json.loads(json.dumps(detail.to_object())).keys() == each.to_object().keys()
        assert (detail.state, detail.rows_done, detail.tokens) == (
            each.state,
            each.rows_done,
            each.tokens,
        )


def test_a_list_reads_no_part_and_takes_few_commands(
    runs: Runs, redis: Redis, tmp_path: Path
) -> None:
    runs.write(["a"] * 60)
    for number in range(3):
        runs.plan(output=tmp_path / f"out{number}", rows_per_shard=1)
    for job in runs.jobs[:20]:
        runs.run(job)
    before, whole = commands(redis), redis.info("commandstats")["cmdstat_hgetall"]["calls"]
    found = list_runs(redis)
    assert sum(each.shards_done for each in found) == sum(each.rows_done for each in found) == 20
    assert commands(redis) - before < 25
    assert redis.info("commandstats")["cmdstat_hgetall"]["calls"] == whole


def test_what_producers_wrote_over_a_run_hides_no_other_one(
    runs: Runs, redis: Redis, tmp_path: Path
) -> None:
    whole, odd, gone = (
        runs.plan(runs.write(["p"]), tmp_path / name)["run"] for name in ("whole", "odd", "gone")
    )
    redis.hset(
        run_key(odd),
        mapping={"began_at": "odd", "ended_at": "nan", "plan_job": "none", "max_errors": "odd"},
    )
    redis.delete(run_key(gone))
    redis.mset({"rq:job:none": 1, run_key(gone): 1})
    assert [each.run for each in list_runs(redis)] == [odd, whole]
    assert list_runs(redis)[0].began_at is None


def test_errors_are_told_by_reason_with_row_numbers(runs: Runs, redis: Redis) -> None:
    prompts = [None, "broken 1", "a", "broken 22", None, "b", "broken 333", "broken 4", "c"]
    runs.write(prompts)
    run = runs.plan(rows_per_shard=2)["run"]
    runs.work(answer=drawn)
    found = [(each.text, each.rows, each.examples) for each in run_reasons(redis, run)]
    assert found == [("it is broken", 4, [1, 3, 6]), ("prompt is null", 2, [0, 4])]
    redis.delete(run_key(run), run_key(run, "parts"), run_key(run, "errors"))
    runs.plan(rows_per_shard=2)
    assert [each.rows for each in run_reasons(redis, run)] == [4, 2]
    assert (list_runs(redis)[0].errors, list_runs(redis)[0].rows_done) == (6, 9)


def test_shards_are_told_one_by_one(runs: Runs, redis: Redis, source: Path) -> None:
    run = runs.plan(source, rows_per_shard=1)["run"]
    *_, failed, last = runs.jobs
    runs.run(last)
    fail(redis, failed, "ValueError")
    redis.hset(failed.key, "worker_name", "w\x1b[2J")
    last.delete()
    part = json.loads(redis.hget(run_key(run, "parts"), "4"))
    redis.hset(run_key(run, "parts"), "4", json.dumps({**part, "worker": "gpu-1"}))
    shards = list_shards(redis, run, 2)
    assert [(each.shard, each.state) for each in shards] == [
        (2, "queued"),
        (3, "failed"),
        (4, "done"),
    ]
    assert (shards[-1].rows_done, shards[-1].errors, shards[1].worker) == (1, 1, r"w\x1b[2J")
    assert (shards[-1].worker, shards[-1].job_id) == ("gpu-1", ""), "as its part says"


def test_of_a_cancelled_run_no_shard_has_failed_and_the_rest_is_left(
    runs: Runs, invoke: Invoke, redis: Redis, source: Path
) -> None:
    run = runs.plan(source, rows_per_shard=1)["run"]
    first, stopped, *_ = runs.jobs
    runs.run(first)
    fail(redis, stopped, "jobs.errors.RunCancelled")  # as RQ keeps what is stopped
    assert invoke("cancel", run).exit_code == 0
    for found in (list_runs(redis)[0], read_planned(redis, run)):
        assert (found.state, found.shards_done, found.shards_failed) == ("cancelled", 1, 0)
        assert found.shards_left == 4
    assert (ended := read_planned(redis, run).rows_per_s)
    assert read_planned(redis, run).rows_per_s == ended, "it does not fall with the time"
    assert [each.state for each in list_shards(redis, run)] == ["done", *["left"] * 4]
