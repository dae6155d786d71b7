"""What planning and workers record for telling when a run ends, and what is made of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis
from rq.utils import utcformat

import jobs.parquet.shard_lengths
from jobs.cli.commands import main
from jobs.common.keys import SILENT_S, WORKER_STATS_TTL_S, worker_key
from jobs.context import JobContext
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.shard_sizes import MAX_SIZES, ShardSizes
from jobs.runs.redis_state.state import RunState
from jobs.runs.watching.snapshot import read_snapshot
from jobs.watch.runs import read_run
from tests.jobs.answering import queued_jobs, run_task, score_parquet

MakeContext = Callable[[], JobContext]
TABLE = pa.table({"prompt": ["x" * n for n in range(1, 101)], "other": ["y" * 500] * 100})


def planned(make_context: MakeContext, source: Path, **arguments: Any) -> Plan:
    output = source.parent / "out"
    score_parquet(make_context(), str(source), str(output), rows_per_shard=25, **arguments)
    return Plan.from_text((output / "_plan.json").read_text())


def sizes(plan: Plan) -> list[float]:
    return [plan.sizes.size_of(shard) for shard in range(len(plan.shards))]


def test_planning_counts_what_the_shards_of_a_small_input_ask(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    pq.write_table(TABLE, tmp_path / "in.parquet")
    plan = planned(make_context, tmp_path / "in.parquet")
    found = sizes(plan)
    assert [plan.sizes.rows_of(shard) for shard in range(4)] == [25] * 4
    assert found == sorted(found)
    assert found[3] == pytest.approx(88 * 25, abs=400), "the prompts' bytes and offsets, not other columns'"
    stored = RunState(redis, plan.run).facts()["sizes"]
    assert ShardSizes.from_value(json.loads(stored)) == plan.sizes


def test_of_larger_inputs_row_groups_and_blocks_tell(
    make_context: MakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.parquet.shard_lengths, "MAX_READ_BYTES", 10)
    pq.write_table(
        TABLE, tmp_path / "in.parquet", row_group_size=50, compression="none", use_dictionary=False
    )
    first, second, third, fourth = sizes(planned(make_context, tmp_path / "in.parquet"))
    assert (first, third) == (second, fourth)
    assert third - first == pytest.approx(50 * 25, rel=0.1), "of 50 tokens more a row"
    for write, name in ((pa.csv.write_csv, "in.csv"), (pa.feather.write_feather, "in.arrow")):
        folder = tmp_path / name
        folder.mkdir()
        write(TABLE, folder / name)
        found = sizes(planned(make_context, folder / name))
        assert found == pytest.approx([sum(found) / 4] * 4, rel=0.01)
        assert sum(found) == pytest.approx((folder / name).stat().st_size, rel=0.01)


def test_input_that_cannot_be_read_is_planned_all_the_same(make_context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "in.parquet", compression="none", use_dictionary=False)
    data = bytearray((tmp_path / "in.parquet").read_bytes())
    data[4:40] = b"\xff" * 36
    (tmp_path / "in.parquet").write_bytes(data)
    assert len(set(sizes(planned(make_context, tmp_path / "in.parquet")))) == 1


def test_a_run_under_way_tells_what_is_left(redis: Redis, make_context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "in.parquet")
    plan = planned(make_context, tmp_path / "in.parquet")
    assert read_snapshot(redis, plan.run).left_s is None
    first, second, *_ = queued_jobs(redis)
    run_task(replace(make_context(), worker_name="w-1"), first.func_name, *first.args)
    (part,) = RunState(redis, plan.run).parts().values()
    assert part.worker == "w-1"
    now = time.time()
    share = sizes(plan)[0] / sum(sizes(plan)) + 0.25
    record = replace(part, started_at=now - 100 * share / 2, ended_at=now)
    redis.hset(f"tokenmill:run:{plan.run}:parts", "0", record.to_record())
    meta = {"rows": 25, "rows_done": 0, "rows_open": 0, "tokens": 0}
    fields = {"status": "started", "meta": json.dumps(meta), "worker_name": "w-1"}
    redis.hset(second.key, mapping={**fields, "started_at": utcformat(datetime.now(UTC))})
    redis.zadd("rq:wip:bulk", {f"{second.id}:abc": 9e12})
    redis.lrem("rq:queue:bulk", 1, second.id)
    left = read_snapshot(redis, plan.run).left_s
    assert left == pytest.approx(100 - 100 * share / 2, rel=0.05)
    assert read_run(redis, plan.run).summary.left_s == pytest.approx(left, abs=2)
    redis.hset(second.key, "meta", json.dumps({**meta, "rows_done": 25}))
    assert (read_snapshot(redis, plan.run).left_s or 0) < 0.9 * (left or 0)
    redis.set(worker_key("w-1"), "{}", ex=WORKER_STATS_TTL_S - 2 * SILENT_S)
    silent = read_snapshot(redis, plan.run).left_s
    assert silent == pytest.approx(left, rel=0.05), "it was killed: its shard is to be done again"
    assert "left     " in CliRunner().invoke(main, ["--url", url_of(redis), "status", plan.run]).output


def url_of(redis: Redis) -> str:
    return f"unix://{redis.connection_pool.connection_kwargs['path']}"


@pytest.mark.parametrize(
    "value", ["", "null", "[]", "[0, [], []]", '[1, ["x"], [1]]', "[1, [1], []]", "[" * 10_000, '{"a": 1}']
)
def test_what_others_wrote_there_tells_nothing(
    redis: Redis, make_context: MakeContext, tmp_path: Path, value: str
) -> None:
    pq.write_table(TABLE, tmp_path / "in.parquet")
    plan = planned(make_context, tmp_path / "in.parquet")
    redis.hset(f"tokenmill:run:{plan.run}", "sizes", value)
    first, *_ = queued_jobs(redis)
    run_task(make_context(), first.func_name, *first.args)
    snapshot = read_snapshot(redis, plan.run)
    assert (snapshot.rows_done, snapshot.left_s is None or snapshot.left_s >= 0) == (25, True)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=3 * MAX_SIZES))
def test_sizes_of_many_shards_are_kept_together_and_add_up(found: list[int]) -> None:
    kept = ShardSizes.of(found, found)
    assert len(kept.sizes) <= MAX_SIZES
    assert (sum(kept.sizes), sum(kept.rows)) == (sum(found), sum(found))
    assert ShardSizes.from_value(json.loads(kept.to_text())) == kept
    if len(found) <= MAX_SIZES:
        assert [kept.size_of(shard) for shard in range(len(found))] == found
