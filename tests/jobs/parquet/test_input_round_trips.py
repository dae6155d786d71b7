"""Whatever objects and fields a file of lines holds, they come back from what is made of it."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.context import JobContext
from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converted_inputs import converted_for_now, scan
from jobs.parquet.planning.find_files import find_files
from jobs.parquet.planning.inputs import read_inputs
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.shards.shard_texts import rendered_shards
from jobs.parquet.tables.columns import PROBLEM
from jobs.parquet.tables.table_reading import open_table
from jobs.runs.plans.spec import RunSpec
from tests.examples import examples
from tests.jobs.conftest import MakeContext
from tests.jobs.local_runs import Runs

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), min_size=1, max_size=8
    )
)
def test_any_objects_come_back_as_they_are_or_as_their_json(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_all(path, "jsonl")
    for row, back in zip(rows, found, strict=True):
        for name in back.keys() - row.keys():
            assert back[name] is None
        for name, value in row.items():
            assert same(value, back[name]), (value, back[name])


def same(value: Any, back: Any) -> bool:
    """Whether a value is what came back: itself, its JSON, or itself with nulls for what others have."""
    if isinstance(value, dict) and isinstance(back, dict):
        return (
            all(same(value.get(name), back[name]) for name in back) and value.keys() <= back.keys()
        )
    if isinstance(value, list) and isinstance(back, list):
        return len(value) == len(back) and all(map(same, value, back))
    if value is None or back is None:
        return value is back
    return value == back or back == json.dumps(value, ensure_ascii=False)


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rows=st.lists(st.tuples(TEXTS, TEXTS), max_size=8))
def test_any_fields_come_back(tmp_path: Path, rows: list[tuple[str, str]]) -> None:
    out = io.StringIO(newline="")
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows([("t", "u"), *rows])
    path = tmp_path / "in.csv"
    path.write_bytes(out.getvalue().encode())
    found = read_all(path, "csv")
    assert [
        tuple("" if row[name] is None else f"{row[name]}" for name in "tu") for row in found
    ] == rows


def read_all(path: Path, input_format: str) -> list[dict[str, Any]]:
    storage = Storage([str(path.parent)])
    kinds = scan(storage, str(path), input_format).kinds
    with open_table(storage, str(path), input_format) as ask:
        question = {"kinds": list(kinds.items()), "rows": None}
        pieces = [body for _, body in ask("jobs.parquet.formats.converter:convert", question)]
    found = pq.read_table(io.BytesIO(b"".join(pieces)))
    return found.drop([PROBLEM]).to_pylist() if kinds else [{}] * found.num_rows


CALLS = st.dictionaries(
    st.sampled_from(["city", "days", "unit"]),
    st.none()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.booleans()
    | TEXTS
    | st.lists(TEXTS),
    max_size=3,
)


@settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    arguments=st.lists(CALLS, min_size=2, max_size=4),
    extra=st.lists(VALUES, min_size=4, max_size=4),
)
def test_what_a_row_of_json_lines_asks_does_not_depend_on_other_rows(
    make_context: MakeContext, tmp_path: Path, arguments: list[dict[str, Any]], extra: list[Any]
) -> None:
    lines = [
        json.dumps({"messages": chat_with_call(each), "extra": value})
        for each, value in zip(arguments, extra, strict=False)
    ]
    for options in (
        {"messages_column": "messages"},
        {"template": "{extra}", "defaults": {"extra": "nothing"}},
    ):
        together = prompts(make_context(), tmp_path, lines, options)
        alone = [prompts(make_context(), tmp_path, [line], options)[0] for line in lines]
        assert together == alone
    chats = prompts(make_context(), tmp_path, lines, {"messages_column": "messages"})
    assert [called(chat) for chat in chats] == arguments


def chat_with_call(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def called(chat: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(chat)[1]["tool_calls"][0]["function"]["arguments"]
    return found


def prompts(
    context: JobContext, folder: Path, lines: list[str], options: dict[str, Any]
) -> list[str]:
    path = folder / "lines.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return rendered(context, path, options)


def rendered(context: JobContext, path: Path, options: dict[str, Any]) -> list[str]:
    """Return what the rows of a file ask, or why they ask nothing."""
    spec = RunSpec.from_arguments([str(path)], str(path.parent / "out"), **options)
    storage = Storage.of(context)
    plan = read_inputs(context, storage, spec, find_files(storage, spec.input, spec.output))
    with converted_for_now(storage, plan, [0]) as (wider, converted):
        shards = rendered_shards(context, wider, converted, row_source(spec))
        return [
            row.prompt if isinstance(row, Row) else str(row) for _, rows in shards for row in rows
        ]


#: What a column of one type, or Arrow's structs, would write otherwise.
OBJECTS: list[dict[str, Any]] = [
    {
        "prompt": "a",
        "o": {"n": 24, "none": None},
        "l": [1, 2.0],
        "mixed": 1,
        "number": 3,
        "big": 2**70,
        "e": {},
    },
    {
        "prompt": "b",
        "o": {"t": 24.0},
        "l": [{"x": None}],
        "mixed": "1",
        "number": 2.5,
        "big": 1,
        "e": {"a": {}},
    },
    {
        "prompt": "c",
        "o": None,
        "l": [],
        "mixed": [True],
        "number": 4.0,
        "big": None,
        "e": {"b": [{"c": "\u2028"}]},
    },
]


@pytest.mark.parametrize(
    "options", [{}, {"keep": ["o", "mixed"]}, {"drop": ["l", "o"]}, {"template": "{prompt} {o}"}]
)
def test_objects_of_json_lines_come_back_in_json_lines_and_csv_as_they_were(
    runs: Runs, tmp_path: Path, options: dict[str, Any]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in OBJECTS))
    wanted = options.get("keep") or [
        name for name in OBJECTS[0] if name not in options.get("drop", ())
    ]
    for kind in ("jsonl", "csv"):
        runs.plan(
            source,
            tmp_path / kind,
            single_file=kind,
            rows_per_shard=2,
            sampling={"temperature": 0},
            **options,
        )
        runs.work()
    lines = (tmp_path / "jsonl" / "output.jsonl").read_text().splitlines()
    for row, line in zip(OBJECTS, lines, strict=True):
        back = json.loads(line)
        assert json.dumps([back[name] for name in wanted]) == json.dumps(
            [row[name] for name in wanted]
        )
        assert back.keys() >= {"completion", "error"}
    with (tmp_path / "csv" / "output.csv").open(newline="") as file:
        for row, back in zip(OBJECTS, csv.DictReader(file), strict=True):
            for name in wanted:
                value = row[name]
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                assert back[name] == ("" if value is None else text)


def test_keys_that_only_other_rows_of_a_parquet_file_have_are_not_asked(
    make_context: MakeContext, tmp_path: Path
) -> None:
    arguments = [
        {"city": "Rome", "days": 24},
        {"unit": {"name": "C"}},
        {"unit": {"scale": 1.5}, "city": ""},
    ]
    path = tmp_path / "in.parquet"
    pq.write_table(
        pa.Table.from_pylist([{"messages": chat_with_call(each)} for each in arguments]), path
    )
    found = rendered(make_context(), path, {"messages_column": "messages"})
    assert [called(chat) for chat in found] == arguments


def test_a_chat_of_json_lines_may_hold_a_bounded_number_of_values(
    make_context: MakeContext, tmp_path: Path
) -> None:
    lines = [
        json.dumps({"messages": chat_with_call({"a": [1] * 60_000})}),
        json.dumps({"messages": chat_with_call({"b": [[]] * 200_000, "c": ",[" * 200_000})}),
        json.dumps({"messages": chat_with_call({"c": ",[" * 200_000})}),
    ]
    found = prompts(make_context(), tmp_path, lines, {"messages_column": "messages"})
    assert "more than the limit of 100000: shorten it" in found[1]
    assert len(called(found[0])["a"]) == 60_000
    assert called(found[2])["c"] == ",[" * 200_000
