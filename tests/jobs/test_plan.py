from __future__ import annotations

import gc
import json
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import InvalidJob, UnsupportedScheme
from jobs.runs.plans.plan import PinnedModel, Plan, PlannedFile, Shards, cut_shards
from jobs.runs.plans.spec import RunSpec

layouts = st.lists(st.lists(st.integers(0, 30), max_size=8), min_size=1, max_size=5)


@given(layouts, st.integers(1, 70))
def test_every_row_is_in_exactly_one_shard_in_order(layout: list[list[int]], rows_per_shard: int) -> None:
    rows = [
        (shard.file, row)
        for shard in cut_shards(layout, rows_per_shard)
        for row in range(shard.start, shard.start + shard.rows)
    ]
    assert rows == [(file, row) for file, groups in enumerate(layout) for row in range(sum(groups))]


@given(layouts, st.integers(1, 70))
def test_a_shard_names_just_the_row_groups_that_hold_its_rows(
    layout: list[list[int]], rows_per_shard: int
) -> None:
    for shard in cut_shards(layout, rows_per_shard):
        assert shard.rows <= rows_per_shard
        groups = layout[shard.file]
        held = groups[shard.first_group : shard.first_group + shard.num_groups]
        assert sum(groups[: shard.first_group]) + shard.skip == shard.start
        if shard.rows:
            assert shard.skip < held[0]
            assert sum(held[:-1]) < shard.skip + shard.rows <= sum(held)


MODEL = PinnedModel("m", "fingerprint of m", "float32")


def test_shards_shrink_towards_the_end_of_a_run_over_all_its_files() -> None:
    sizes = [shard.rows for shard in cut_shards([[10_000], [700, 3300]], 1000)]
    assert sizes[:7] == [1000] * 7  # 7,000 rows are left then
    assert sizes[7:11] == [875, 765, 670, 586]
    assert sizes[11] == 104  # where the first file ends
    assert sizes[-8:] == [128] * 7 + [28]
    assert cut_shards([[10_000], [700, 3300]], 1000) == cut_shards([[10_000], [700, 3300]], 1000)


def test_a_short_run_has_shards_of_the_size_that_was_asked_for() -> None:
    assert [shard.rows for shard in cut_shards([[8000]], 1000)] == [1000] * 8
    assert [shard.rows for shard in cut_shards([[999]], 1000)] == [999]


def test_small_shards_do_not_shrink() -> None:
    """Smaller ones would not fill a worker's batch."""
    assert [shard.rows for shard in cut_shards([[2000]], 128)] == [128] * 15 + [80]
    assert [shard.rows for shard in cut_shards([[7]], 3)] == [3, 3, 1]


def test_no_rows_at_all_give_one_empty_shard() -> None:
    assert [shard.rows for shard in cut_shards([[], [0, 0]], 10)] == [0]


def make_spec(**changed: object) -> RunSpec:
    return RunSpec.from_arguments(**{"input": "/a.parquet", "output": "/out", **changed})


def test_a_plan_survives_its_file() -> None:
    files = (PlannedFile("/a", 10, 20, 5, "f"), PlannedFile("/b", 1, 2, 3, "g"))
    plan = Plan(make_spec(), 7, MODEL, "1", files, cut_shards([[2, 3], [3]], 2))
    assert Plan.from_text(plan.to_text()) == plan
    assert [plan.first_row(shard) for shard in range(len(plan.shards))] == [0, 2, 4, 5, 7]


def test_a_plan_takes_few_bytes_for_each_shard() -> None:
    """A worker keeps plans of up to 100,000 shards."""
    shards = cut_shards([[10_000] * 500], 1000)
    text = Plan(make_spec(), 7, MODEL, "1", (PlannedFile("/a", 1, 2, 5_000_000, "f"),), shards).to_text()
    tracemalloc.start()
    try:
        plan = Plan.from_text(text)
        gc.collect()
        assert plan.shards == shards
        assert tracemalloc.get_traced_memory()[0] < 64 * len(shards)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        "{}",
        '{"format": 2}',
        '{"format": 1}',
        '{"format": 1, "arguments": 3}',
        '{"format": 1, "arguments": []}',
    ],
)
def test_what_is_no_plan_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Plan.from_text(text)


def test_a_plan_whose_arguments_were_edited_is_refused() -> None:
    plan = Plan(make_spec(), 7, MODEL, "1", (), Shards())
    with pytest.raises(ValueError, match="run id"):
        Plan.from_text(plan.to_text().replace("/a.parquet", "/b.parquet"))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"run": None}, "run id"),
        ({"files": None}, "missing or wrong"),
        ({"files": [1]}, "missing or wrong"),
        ({"shards": [1]}, "missing or wrong"),
        ({"shards": [[0, 0]]}, "missing or wrong"),
        ({"shards": [[0, 0, 1, 0, 1, "0"]]}, "no count"),
        ({"shards": [[0, -1, 1, 0, 1, 0]]}, "no count"),
        ({"shards": [[0, 1 << 63, 1, 0, 1, 0]]}, "no count"),
        ({"shards": [[1, 0, 1, 0, 1, 0]]}, "does not list"),
    ],
)
def test_a_plan_with_an_edited_field_is_refused(changed: dict[str, object], says: str) -> None:
    plan = Plan(make_spec(), 7, MODEL, "1", (PlannedFile("/a", 10, 20, 5, "f"),), cut_shards([[5]], 2))
    content = json.loads(plan.to_text())
    with pytest.raises(ValueError, match=says):
        Plan.from_text(json.dumps({**content, **changed}))
    for name in changed:
        del content[name]
    with pytest.raises(ValueError, match="missing or wrong"):
        Plan.from_text(json.dumps(content))


def test_equal_arguments_give_the_same_run_and_other_arguments_another() -> None:
    spec = make_spec(sampling={"temperature": 0, "max_tokens": 3})
    assert spec.run == make_spec(sampling={"max_tokens": 3, "temperature": 0}, input=["/x/../a.parquet"]).run
    for other in (
        {"input": "/b.parquet"},
        {"output": "/out2"},
        {"prompt_column": "p"},
        {"rows_per_shard": 9},
        {"sampling": {}},
    ):
        assert make_spec(**{"sampling": spec.sampling, **other}).run != spec.run
    assert spec.differences(replace(spec, rows_per_shard=2, output="/o")) == ["output", "rows_per_shard"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"input": []}, "empty list"),
        ({"input": ""}, "no path"),
        ({"input": 5}, "no path"),
        ({"input": "a\0b"}, "no path"),
        ({"output": None}, "no path"),
        ({"input": "file:///a%00b"}, "zero byte"),
        ({"input": "/a\ud800"}, "UTF-8"),
        ({"output": "/a\udc80"}, "UTF-8"),
        ({"prompt_column": 3}, "prompt_column"),
        ({"messages_column": ""}, "messages_column"),
        ({"messages_column": "m", "template": "{a}"}, "give one"),
        ({"sampling": "{}"}, "sampling:="),
        ({"sampling": {"max_tokens": "64"}}, "max_tokens:=64"),
        ({"sampling": {"n": 1001}}, "n is 1001"),
        ({"rows_per_shard": "10"}, "rows_per_shard:="),
        ({"rows_per_shard": 0}, "from 1"),
        ({"rows_per_shard": True}, "from 1"),
        ({"rows_per_shard": 10**7}, "1000000"),
        ({"template": "{a.b}"}, "plain column name"),
        ({"template": "{a[0]}"}, "plain column name"),
        ({"template": "{a!r}"}, "plain column name"),
        ({"template": "{a:>10}"}, "plain column name"),
        ({"template": "{}"}, "plain column name"),
        ({"template": "{a"}, "{{"),
        ({"template": []}, "non-empty list"),
        ({"template": [{"role": "user"}]}, "exactly"),
        ({"template": [{"role": "user", "content": 5}]}, "strings"),
    ],
)
def test_wrong_arguments_of_a_run_are_refused_before_anything_is_read(
    changed: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidJob) as caught:
        make_spec(**changed)
    assert says in str(caught.value)


@pytest.mark.parametrize("path", ["hdfs://host/a", "http://host/a", "s3a://bucket/a", "file://elsewhere/a"])
def test_storages_that_are_not_built_are_refused_by_name(path: str) -> None:
    with pytest.raises(UnsupportedScheme, match=path):
        make_spec(input=path)


@pytest.mark.parametrize(
    "path",
    ["ftp://id:s3cret@bucket/a?key=s3cret", "file://id:s3cret@elsewhere/a", "file://[s3cret@x/a#s3cret"],
)
def test_the_keys_in_a_uri_are_not_repeated(path: str) -> None:
    with pytest.raises(UnsupportedScheme) as caught:
        make_spec(input=path)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "path",
    [
        "s3://id:s3cret@bucket/a?key=s3cret",
        "S3://bucket/a?s3cret",
        "gs://bucket/a#s3cret",
        "az://id:s/s3cret@a",
    ],
)
def test_a_store_s_keys_belong_into_no_path(path: str) -> None:
    with pytest.raises(InvalidJob, match="keys for the store belong into") as caught:
        make_spec(input=path)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "path", ["s3://bucket/../a", "s3://bucket/a//b", "s3://bucket/./a", "gs://bucket/a/.."]
)
def test_an_object_s_path_has_no_empty_segment_and_no_dots(path: str) -> None:
    with pytest.raises(InvalidJob, match=r"an empty segment, '\.' or '\.\.'"):
        make_spec(input=path)


def test_an_object_s_path_stays_as_it_is_written() -> None:
    spec = make_spec(input=["S3://Bucket/a b/ä%20/k=v/", "gs://b", "az://c/*.parquet"], output="s3://b/out/")
    assert spec.input == ["s3://Bucket/a b/ä%20/k=v", "gs://b", "az://c/*.parquet"]
    assert spec.output == "s3://b/out"


LONG = "a secret prompt " * 100


@pytest.mark.parametrize(
    "changed",
    [
        {"input": [[LONG]]},
        {"prompt_column": [LONG]},
        {"messages_column": {"x": LONG}},
        {"sampling": {"n": LONG}},
        {"sampling": {"max_tokens": LONG}},
        {"rows_per_shard": LONG},
        {"rows_per_shard": [LONG]},
        {"template": f"{{{LONG}"},
        {"template": f"{{{LONG}.x}}"},
        {"template": [{"role": "user", "content": LONG, "name": "x"}]},
        {"template": [{"role": "user", "content": [LONG]}]},
    ],
)
def test_a_message_repeats_little_of_what_a_job_brought(changed: dict[str, object]) -> None:
    with pytest.raises(InvalidJob) as caught:
        make_spec(**changed)
    assert len(str(caught.value)) < 400


def test_a_file_uri_is_a_local_path() -> None:
    assert make_spec(input="file:///a%20b.parquet").input == ["/a b.parquet"]
