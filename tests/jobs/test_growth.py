"""What a plan becomes whose input has grown: the rows it had stay, new ones are in one shard each."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.parquet.growth import extended
from jobs.parquet.inputs import Inputs
from jobs.runs.plans.plan import Plan, PlannedFile, Shard, cut_shards
from tests.jobs.test_plan import MODEL, make_spec

#: Of each moment the row groups that each of the files has gained.
Growth = list[list[list[int]]]
GROWTH = st.lists(
    st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=4), min_size=1, max_size=4
)


@settings(max_examples=50, deadline=None)
@given(GROWTH, st.integers(1, 9))
def test_old_shards_stay_and_new_rows_are_in_one_each(growth: Growth, rows_per_shard: int) -> None:
    layout: list[list[int]] = []
    plan: Plan | None = None
    for moment, gains in enumerate(growth):
        layout += [[] for _ in range(len(gains) - len(layout))]
        for groups, gained in zip(layout, gains, strict=False):
            groups += gained
        before, plan = plan, _planned(plan, layout, rows_per_shard, moment)
        if before is not None and before.rows:  # one without rows is begun anew
            assert _rows(plan)[: before.rows] == _rows(before)
            assert list(plan.shards)[: len(before.shards)] == list(before.shards)
        assert sorted(_rows(plan)) == [(n, row) for n, each in enumerate(layout) for row in range(sum(each))]
        assert all(_reads_from_its_first_row(layout[_file(plan, shard)], shard) for shard in plan.shards)
        assert Plan.from_text(plan.to_text()) == plan


def _planned(plan: Plan | None, layout: list[list[int]], rows_per_shard: int, moment: int) -> Plan:
    files = tuple(
        PlannedFile(str(n), 10 + sum(groups), 1, sum(groups), f"{n}: {sum(groups)}")
        for n, groups in enumerate(layout)
    )
    inputs = Inputs(files, tuple(map(tuple, layout)), pa.schema([]), (), "jsonl")
    if plan is not None:
        return extended(plan, inputs, ["/in"], lambda file: True, float(moment)) or plan
    shards = cut_shards(layout, rows_per_shard)
    return Plan(make_spec(rows_per_shard=rows_per_shard), 7, MODEL, "1", files, shards, input_format="jsonl")


def _rows(plan: Plan) -> list[tuple[int, int]]:
    """Return each row of the run, by its number: its file, and its place there."""
    found = {
        plan.first_row(number) + row: (_file(plan, shard), shard.start + row)
        for number, shard in enumerate(plan.shards)
        for row in range(shard.rows)
    }
    assert list(found) == list(range(plan.rows))
    return list(found.values())


def _file(plan: Plan, shard: Shard) -> int:
    return int(plan.files[shard.file].path)


def _reads_from_its_first_row(groups: list[int], shard: Shard) -> bool:
    return sum(groups[: shard.first_group]) + shard.skip == shard.start
