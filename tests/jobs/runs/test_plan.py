import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.context.served_model import PinnedModel
from jobs.errors import InvalidJob, UnsupportedScheme
from jobs.runs.plans.plan import Plan, PlannedFile, cut_shards
from jobs.runs.plans.spec import RunSpec
from tests.examples import examples

layouts = st.lists(st.lists(st.integers(0, 30), max_size=8), min_size=1, max_size=5)


@settings(max_examples=examples(50))
@given(layouts, st.integers(1, 70), st.none() | st.integers(1, 200))
def test_every_row_up_to_the_limit_is_in_exactly_one_shard_in_order(
    layout: list[list[int]], rows_per_shard: int, limit: int | None
) -> None:
    rows = [
        (shard.file, row)
        for shard in cut_shards(layout, rows_per_shard, limit)
        for row in range(shard.start, shard.start + shard.rows)
    ]
    assert (
        rows
        == [(file, row) for file, groups in enumerate(layout) for row in range(sum(groups))][:limit]
    )


@settings(max_examples=examples(50))
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


def test_no_rows_at_all_give_one_empty_shard() -> None:
    assert [shard.rows for shard in cut_shards([[], [0, 0]], 10)] == [0]


def make_spec(**changed: object) -> RunSpec:
    return RunSpec.from_arguments(**{"input": "/a.parquet", "output": "/out", **changed})


def test_a_plan_survives_its_file() -> None:
    files = (PlannedFile("/a", 10, 20, 5, "f"), PlannedFile("/b", 1, 2, 3, "g"))
    plan = Plan(make_spec(), 7, MODEL, "1", files, cut_shards([[2, 3], [3]], 2))
    assert Plan.from_text(plan.to_text()) == plan
    assert [plan.first_row(shard) for shard in range(len(plan.shards))] == [0, 2, 4, 5, 7]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1, "arguments": []}'])
def test_what_is_no_plan_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Plan.from_text(text)


def test_a_plan_whose_arguments_were_edited_is_refused() -> None:
    plan = Plan(make_spec(), 7, MODEL, "1", (), ())
    with pytest.raises(ValueError, match="run id"):
        Plan.from_text(plan.to_text().replace("/a.parquet", "/b.parquet"))


def test_a_plan_in_which_a_number_has_changed_is_refused() -> None:
    text = Plan(
        make_spec(), 7, MODEL, "1", (PlannedFile("/a", 10, 20, 5, "f"),), cut_shards([[5]], 2)
    ).to_text()
    with pytest.raises(ValueError, match="not as they were written"):
        Plan.from_text(text.replace("[0, 2, 2, ", "[0, 3, 2, "))


def test_a_plan_that_lacks_a_field_is_refused() -> None:
    plan = Plan(
        make_spec(), 7, MODEL, "1", (PlannedFile("/a", 10, 20, 5, "f"),), cut_shards([[5]], 2)
    )
    content = json.loads(plan.to_text())
    for changed in (
        {**content, "files": None},
        {k: v for k, v in content.items() if k != "shards"},
    ):
        with pytest.raises(ValueError, match="missing or wrong"):
            Plan.from_text(json.dumps(changed))


def test_equal_arguments_give_the_same_run_and_other_arguments_another() -> None:
    spec = make_spec(sampling={"temperature": 0, "max_tokens": 3})
    assert (
        spec.run
        == make_spec(sampling={"max_tokens": 3, "temperature": 0}, input=["/x/../a.parquet"]).run
    )
    for other in (
        {"input": "/b.parquet"},
        {"output": "/out2"},
        {"prompt_column": "p"},
        {"rows_per_shard": 9},
        {"sampling": {}},
    ):
        assert make_spec(**{"sampling": spec.sampling, **other}).run != spec.run
    assert spec.differences(replace(spec, rows_per_shard=2, output="/o")) == [
        "output",
        "rows_per_shard",
    ]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"input": []}, "empty list"),
        ({"output": "/a\udc80"}, "UTF-8"),
        ({"messages_column": "m", "template": "{a}"}, "give one"),
        ({"sampling": {"max_tokens": "64"}}, "max_tokens:=64"),
        ({"rows_per_shard": 0}, "from 1"),
        ({"rows_per_shard": 10**7}, "1000000"),
        ({"template": "{a.b}"}, "plain column name"),
        ({"template": [{"role": "user"}]}, "exactly"),
    ],
)
def test_wrong_arguments_of_a_run_are_refused_before_anything_is_read(
    changed: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidJob) as caught:
        make_spec(**changed)
    assert says in str(caught.value)


@pytest.mark.parametrize("path", ["hdfs://host/a", "file://elsewhere/a"])
def test_storages_that_are_not_built_are_refused_by_name(path: str) -> None:
    with pytest.raises(UnsupportedScheme, match=path):
        make_spec(input=path)


@pytest.mark.parametrize(
    "path", ["ftp://id:s3cret@bucket/a?key=s3cret", "file://id:s3cret@elsewhere/a"]
)
def test_the_keys_in_a_uri_are_not_repeated(path: str) -> None:
    with pytest.raises(UnsupportedScheme) as caught:
        make_spec(input=path)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("path", ["s3://id:s3cret@bucket/a?key=s3cret", "az://id:s/s3cret@a"])
def test_a_store_s_keys_belong_into_no_path(path: str) -> None:
    with pytest.raises(InvalidJob, match="keys for the store belong in") as caught:
        make_spec(input=path)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("path", ["s3://bucket/../a", "s3://bucket/a//b"])
def test_an_object_s_path_has_no_empty_segment_and_no_dots(path: str) -> None:
    with pytest.raises(InvalidJob, match=r"an empty segment, '\.' or '\.\.'"):
        make_spec(input=path)


LONG = "a secret prompt " * 100
