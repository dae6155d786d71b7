"""Answers that are JSON of a schema become columns with its types."""

import csv
import datetime
import enum
import itertools
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
import pytest

import jobs
from jobs.context.checks import Checks
from jobs.errors import InvalidJob
from jobs.installed import json_schema_of
from jobs.parquet.asks.row_keys import RowKeys
from jobs.parquet.outputs.parsed_answers import CUT_TEXT, arrow_type, parsed_text
from jobs.runs.plans.schema_types import type_of_schema
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion
from tests.jobs.conftest import Invoke, MakeContext
from tests.jobs.local_runs import Runs


class Mood(enum.StrEnum):
    GOOD = "good"
    BAD = "bad"


class Author(pydantic.BaseModel):
    name: str
    born: datetime.date | None = None


class Review(pydantic.BaseModel):
    stars: int
    share: float
    mood: Mood
    kind: Literal["a", "b"] | None
    authors: list[Author]
    counts: dict[str, int]
    at: datetime.datetime
    rough: int | float


class Bill(pydantic.BaseModel):
    total: Decimal
    tip: Decimal | None


class Stars(pydantic.BaseModel):
    stars: int


class Node(pydantic.BaseModel):
    child: "Node | None"


WHOLE: dict[str, Any] = {
    "stars": 5,
    "share": 1,
    "mood": "good",
    "kind": None,
    "authors": [{"name": "Ä", "born": "1987-03-03"}, {"name": "b", "born": None}],
    "counts": {"x": 1},
    "at": "2026-11-29T10:00:00+01:00",
    "rough": 2,
}


def test_a_class_gives_structs_lists_maps_and_dates() -> None:
    kind = type_of_schema(json_schema_of(Review))
    column = pa.array([parsed_text(kind, json.dumps(WHOLE)).value], arrow_type(kind))
    author = pa.struct([("name", pa.string()), ("born", pa.date32())])
    assert column.type == pa.struct(
        [
            ("stars", pa.int64()),
            ("share", pa.float64()),
            ("mood", pa.string()),
            ("kind", pa.string()),
            ("authors", pa.list_(author)),
            ("counts", pa.map_(pa.string(), pa.int64())),
            ("at", pa.timestamp("us", "UTC")),
            ("rough", pa.float64()),
        ]
    )
    (value,) = column.to_pylist()
    assert value["authors"][0] == {"name": "Ä", "born": datetime.date(1987, 3, 3)}
    assert value["at"] == datetime.datetime(2026, 11, 29, 9, tzinfo=datetime.UTC)
    assert value["counts"] == [("x", 1)]


def test_a_decimal_is_a_text_whether_the_model_wrote_a_number_or_a_text() -> None:
    kind = type_of_schema(json_schema_of(Bill))
    assert arrow_type(kind) == pa.struct([("total", pa.string()), ("tip", pa.string())])
    values = [
        parsed_text(kind, answer).value
        for answer in ('{"total": 19.90, "tip": null}', '{"total": "1.10", "tip": 2}')
    ]
    assert values == [{"total": "19.90", "tip": None}, {"total": "1.10", "tip": "2"}]
    long = parsed_text(kind, '{"total": 12345678901234567.89, "tip": 1e400}').value
    assert long == {"total": "12345678901234567.89", "tip": "1e400"}, "digits are as written"
    assert parsed_text(kind, '{"total": true, "tip": null}').value is None


@pytest.mark.parametrize("kinds", list(itertools.permutations(["number", "integer", "string"])))
def test_the_order_of_the_types_of_a_decimal_does_not_matter(kinds: tuple[str, ...]) -> None:
    assert arrow_type(type_of_schema({"type": list(kinds)})) == pa.string()
    assert arrow_type(type_of_schema({"enum": ["a", 1.5, 2, None]})) == pa.string()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"stars": "5"}, r"\$\.stars: '5' is no integer"),
        ({"stars": True}, r"\$\.stars: True is no integer"),
        ({"stars": 2**63}, r"\$\.stars: .* is no integer"),
        ({"share": None}, r"\$\.share: None is no number"),
        ({"at": "2026-11-29T10:00:00"}, "is no date-time"),
        ({"mood": "\ud800"}, "valid Unicode"),
        ({"counts": {"\ud800": 1}}, "valid Unicode"),
        ({"authors": [{"name": "a"}, {}]}, r"authors\[1\]: 'name' is a required property"),
    ],
)
def test_a_value_of_another_type_is_null_with_the_reason(
    change: dict[str, Any], reason: str
) -> None:
    kind = type_of_schema(json_schema_of(Review))
    parsed = parsed_text(kind, json.dumps({**WHOLE, **change}))
    assert parsed.value is None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(parsed.reason)


@pytest.mark.parametrize("text", ["", '{"stars": 5', "[" * 100_000, '{"stars": NaN}', "1" * 5000])
def test_what_is_no_json_is_null_with_the_reason(text: str) -> None:
    kind = type_of_schema(json_schema_of(Stars))
    value, reason = parsed_text(kind, text)
    assert value is None
    assert reason


WIDE: dict[str, Any] = {"type": "object", "properties": {}}
for _number in range(20):
    WIDE["properties"][f"p{_number}"] = {"$ref": f"#/$defs/d{_number}"}
WIDE["$defs"] = {"d0": {"type": "string"}}
for _number in range(1, 20):
    _reference = {"$ref": f"#/$defs/d{_number - 1}"}
    WIDE["$defs"][f"d{_number}"] = {
        "type": "object",
        "properties": {"a": _reference, "b": _reference},
    }


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            r"different types \(string and integer",
        ),
        ({"type": "object", "properties": {"a": {"type": ["string", "object"]}}}, r"\$\.a of"),
        ({"enum": [1, "a"]}, "integer and string"),
        ({"type": "object"}, "without properties"),
        ({"type": "object", "properties": {"a": {}}, "required": 5}, r"\$\.a of"),
        (
            {"type": "object", "properties": {"a": {"type": "string"}}, "required": 5},
            "no list of names",
        ),
        ({"type": "array"}, r"\$\[\] of the schema"),
        ({"type": "array", "prefixItems": [{"type": "string"}]}, "prefixItems"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "allOf"),
        ({"$ref": "https://example.com/x"}, "not in this schema"),
        ({"type": "null"}, "null alone"),
        ({}, "no type"),
        (json_schema_of(Node), "holds itself"),
        (WIDE, "more than 10000 values"),
    ],
)
def test_a_schema_that_fits_into_no_column_is_refused_by_name(
    schema: dict[str, Any], reason: str
) -> None:
    sampling = {"structured_outputs": {"json": schema}}
    with pytest.raises(InvalidJob, match=reason):
        RunSpec.from_arguments("in", "out", parse=True, sampling=sampling)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": {"structured_outputs": {"regex": "a"}}},
        {"labels": ["a", "b"]},
        {"prompts": [{"name": "a", "template": "{x}"}]},
        {"task": "embed"},
    ],
)
def test_parse_is_refused_where_no_answer_has_a_schema(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match="parse"):
        RunSpec.from_arguments("in", "out", parse=True, **options)


def stars(request: Request) -> FakeCompletion:
    """Answer a prompt with its own text; a long one is cut."""
    text = str(request.prompt)
    return FakeCompletion(text[:12], 0, [1], "length" if len(text) > 12 else "stop", 1)


@pytest.fixture
def parsed(runs: Runs, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setenv("RQ_REDIS_URL", redis_url)
    runs.write(['{"stars":1}', '{"stars":12345}', None])
    return runs


def test_a_run_has_columns_of_its_answers(parsed: Runs, invoke: Invoke, tmp_path: Path) -> None:
    run = jobs.submit(parsed.source, parsed.output, response_format=Stars, parse=True)
    schema = tmp_path / "stars.json"
    schema.write_text(json.dumps(json_schema_of(Stars)))
    options = ["--response-format", schema, "--parse"]
    assert invoke("submit", parsed.source, parsed.output, *options).stdout.strip() == run.id
    parsed.work(stars)
    parsed.work(stars)
    table = pq.read_table(parsed.output)
    assert table.schema.field("parsed").type == pa.struct([("stars", pa.int64())])
    assert table["parsed"].to_pylist() == [{"stars": 1}, None, None]
    reasons = table["parse_error"].to_pylist()
    assert (reasons[0], reasons[2]) == (None, None)
    assert reasons[1] == CUT_TEXT
    assert table["error"].to_pylist() == [None, None, "prompt is null"]
    # The columns are made of the texts: a run without them takes the answers.
    again = parsed.output.with_name("again")
    jobs.submit(parsed.source, again, response_format=Stars, reuse=parsed.output)
    parsed.work(stars)
    parsed.work(stars)
    assert json.loads((again / "_manifest.json").read_text())["rows_reused"] == 2
    assert "parsed" not in pq.read_table(again).column_names


def test_several_answers_of_a_row_are_parsed_each(parsed: Runs) -> None:
    sampling = {"n": 2, "structured_outputs": {"json": json.dumps(json_schema_of(Stars))}}
    parsed.plan(parse=True, sampling=sampling, single_file="csv", output_prefix="llm_", keep=[])
    parsed.work(stars)
    with (parsed.output / "output.csv").open() as file:
        first, cut, failed = csv.DictReader(file)
    assert json.loads(first["llm_parsed"]) == [
        {"stars": 1},
        None,
    ]  # the second sample ends with "!"
    assert "it is not JSON" in json.loads(first["llm_parse_error"])[1]
    assert json.loads(cut["llm_parsed"]) == [None, None]
    assert json.loads(cut["llm_parse_error"]) == [CUT_TEXT, CUT_TEXT]
    assert failed["llm_parsed"] == ""


def test_each_of_several_prompts_with_a_schema_has_its_columns(parsed: Runs) -> None:
    schema = {"json": json_schema_of(Stars)}
    prompts = [
        {"name": "first", "template": "{prompt}", "sampling": {"structured_outputs": schema}},
        {"name": "second", "template": "of {first}"},
        {"name": "third", "template": "{prompt}", "sampling": {"structured_outputs": schema}},
    ]
    parsed.plan(parse=True, prompts=prompts, sampling={"temperature": 0})
    parsed.work(stars)
    table = pq.read_table(parsed.output)
    assert [name for name in table.column_names if "_parse" in name] == [
        "first_parsed",
        "first_parse_error",
        "third_parsed",
        "third_parse_error",
    ]
    for name in ("first", "third"):
        assert table[f"{name}_parsed"].to_pylist() == [{"stars": 1}, None, None]
        assert table[f"{name}_parse_error"][1].as_py() == CUT_TEXT


def test_an_answer_that_failed_its_check_has_the_checks_reason(
    parsed: Runs, checks: Checks, make_context: MakeContext
) -> None:
    parsed.context = lambda: replace(make_context(), checks=checks)
    table = parsed.score(
        answer=lambda request: FakeCompletion('{"stars":"x"}', 0, [1], "stop", 1),
        check={"json": json_schema_of(Stars)},
        parse=True,
        max_attempts=1,
    )
    assert table["parsed"].to_pylist() == [None, None, None]
    assert table["parse_error"].to_pylist() == table["check_error"].to_pylist()
    assert "is not of type 'integer'" in table["parse_error"][0].as_py()


def test_blanks_decide_the_answer_and_columns_do_not() -> None:
    form = {"type": "json_schema", "json_schema": {"schema": json_schema_of(Stars)}}
    names = []
    for sampling, parse in (
        ({}, False),
        ({"allow_whitespace": False}, True),
        ({"allow_whitespace": True}, False),
    ):
        spec = RunSpec.from_arguments(
            "in", "out", sampling={"response_format": form, **sampling}, parse=parse
        )
        names.append(RowKeys(spec, None, "").name)
    assert names[0] == names[1] != names[2]
    with pytest.raises(InvalidJob, match="allow_whitespace is for answers that are JSON"):
        RunSpec.from_arguments("in", "out", sampling={"allow_whitespace": True})
