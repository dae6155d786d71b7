"""CSV, TSV, JSONL and Arrow tables are input as Parquet files are: same plan, shards, resume and errors."""

import gzip
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from jobs.context import JobContext
from jobs.context.shared_files import SharedFiles
from jobs.errors import (
    ConvertedInputGone,
    CorruptTable,
    InputChanged,
    InvalidJob,
    InvalidValue,
    MarkedAsUTF8,
    MissingColumn,
    MixedFormats,
    NestedFolders,
    OtherDelimiter,
    OtherEncoding,
    SchemaMismatch,
    TableNotRead,
    TooManyBadLines,
)
from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converted_inputs import converted_for_now, scan
from jobs.parquet.formats.records import MAX_LINE_BYTES
from jobs.parquet.planning.find_files import find_files
from jobs.parquet.planning.inputs import read_inputs
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.shards.shard_texts import rendered_shards
from jobs.runs.plans.spec import RunSpec
from tests.examples import examples
from tests.jobs.answering import opened_task, queued_jobs, run_task, score_parquet, work_off
from tests.jobs.conftest import Invoke, MakeContext
from tests.jobs.input_files import (
    ROWS,
    WRITERS,
    read_rows,
    score,
    write_feather,
    write_jsonl,
    write_stream,
)
from tests.jobs.local_runs import Runs

Scored = Callable[..., pa.Table]


@pytest.fixture
def scored(runs: Runs) -> Scored:
    """Runs a file to its end; returns the output."""
    return partial(runs.score, sampling={"temperature": 0}, rows_per_shard=5)


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_gives_the_rows_that_a_parquet_file_does(
    redis: Redis, make_context: MakeContext, tmp_path: Path, name: str
) -> None:
    source = WRITERS[name](tmp_path / name)
    planned = score(make_context(), source, tmp_path)
    assert (planned["rows"], planned["shards"]) == (23, 5)
    jobs = queued_jobs(redis)
    for job in [*jobs[3:], *jobs[:3]]:  # other shards first, as other workers take them
        run_task(make_context(), job.func_name, *job.args)
        job.delete()
    rows = read_rows(tmp_path / "out")
    assert [{key: row[key] for key in ROWS[0]} for row in rows] == ROWS
    assert [row["completion"] for row in rows] == [f"P{number}" for number in range(23)]
    again = score(make_context(), source, tmp_path)
    assert again["already_finished"]
    assert not (tmp_path / "out" / "_input").exists()


def test_rows_of_many_groups_are_read_from_any_shard_on(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    rows = [{"prompt": f"p{number}", "long": str(number) * 20_000} for number in range(500)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    score(make_context(), tmp_path / "in.jsonl", tmp_path, rows_per_shard=90)
    (converted,) = (tmp_path / "out" / "_input").iterdir()
    assert pq.read_metadata(converted).num_row_groups > 2
    jobs = queued_jobs(redis)
    for job in [*jobs[3:], *jobs[:3]]:
        run_task(make_context(), job.func_name, *job.args)
        job.delete()
    found = read_rows(tmp_path / "out")
    assert [(row["prompt"], row["long"]) for row in found] == [
        (row["prompt"], row["long"]) for row in rows
    ]


def test_what_was_made_of_an_input_and_is_gone_is_made_again(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl")
    score(make_context(), source, tmp_path)
    first, *rest = queued_jobs(redis)
    run_task(make_context(), first.func_name, *first.args)
    shutil.rmtree(tmp_path / "out" / "_input")
    with pytest.raises(ConvertedInputGone, match="submit the run again"):
        run_task(make_context(), rest[0].func_name, *rest[0].args)
    assert score(make_context(), source, tmp_path)["input_bytes"] > 0
    work_off(redis, make_context)
    assert [row["completion"] for row in read_rows(tmp_path / "out")] == [
        f"P{n}" for n in range(23)
    ]


def test_csv_is_read_as_the_csv_module_writes_it(scored: Scored, tmp_path: Path) -> None:
    texts = ['say "hi"', "a,b", "two\r\nlines", "ünï", " spaces ", 'in 5" of', "'"]
    frame = pd.DataFrame(
        {
            "prompt": texts,
            "zip": ["01234"] * 7,
            "count": [1, 2, 3, None, 5, 6, 7],
            "big": [2**62] * 7,
            "yes": [True, False] * 3 + [True],
            "half": ["0.5", "2.5", "-3", "0", "7", "8", "9"],
            "exp": ["1e3", "2.5", "-3", "0", "7", "8", "9"],
            "none": [None] * 7,
            "huge": [str(10**30)] * 7,
        }
    )
    frame["count"] = frame["count"].astype("Int64")
    (tmp_path / "in.csv").write_text(
        "\ufeff" + frame.to_csv(index=False), encoding="utf-8", newline=""
    )
    table = scored(tmp_path / "in.csv")
    assert table["prompt"].to_pylist() == texts
    kinds = {name: str(table.schema.field(name).type) for name in table.column_names[:9]}
    assert kinds == {
        "prompt": "string", "zip": "string", "count": "int64", "big": "int64",
        "yes": "bool", "half": "double", "exp": "string", "none": "string", "huge": "string",
    }  # fmt: skip
    assert table["count"].to_pylist() == [1, 2, 3, None, 5, 6, 7]
    assert table["big"].to_pylist() == [2**62] * 7
    assert table["half"].to_pylist() == [0.5, 2.5, -3, 0, 7, 8, 9]
    assert table["exp"].to_pylist() == [
        "1e3",
        "2.5",
        "-3",
        "0",
        "7",
        "8",
        "9",
    ]  # which 1000.0 would not give back


_NUMBERS = st.sampled_from(
    [
        *(
            "1.10",
            "5.00",
            "1E5",
            "1e5",
            "TRUE",
            "true",
            "True",
            "False",
            "02139",
            "-0",
            "0",
            "7",
            "1.0",
            "2.5",
        ),
        *(
            "1e+16",
            "9007199254740993",
            "123456789012345678901234567890",
            "+5",
            ".5",
            "5.",
            "1_000",
            "0x10",
        ),
        *("NaN", "inf", "None"),
    ]
)


@given(columns=st.lists(st.lists(_NUMBERS, min_size=3, max_size=3), min_size=1, max_size=3))
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.parametrize("template_format", ["fields", "jinja"])
def test_a_template_shows_the_text_that_a_csv_file_has_and_the_output_loses_none(
    make_context: MakeContext, tmp_path: Path, template_format: str, columns: list[list[str]]
) -> None:
    """Beside any other values, in the same file or in another one of the run."""
    names = [f"c{number}" for number in range(len(columns))]
    files = []
    for number, row in enumerate(zip(*columns, strict=True)):
        files.append(tmp_path / f"{number}.csv")
        files[-1].write_text(f"{','.join(names)}\n{','.join(row)}\n")
    braces = "{{%s}}" if template_format == "jinja" else "{%s}"
    template = " ".join(braces % name for name in names)
    spec = RunSpec.from_arguments(
        list(map(str, files)),
        str(tmp_path / "out"),
        template=template,
        template_format=template_format,
    )
    context = make_context()
    storage = Storage.of(context)
    plan = read_inputs(context, storage, spec, find_files(storage, spec.input, spec.output))
    with converted_for_now(storage, plan, range(len(files))) as (wider, converted):
        rows = [
            row
            for _, rows in rendered_shards(context, wider, converted, row_source(spec))
            for row in rows
        ]
    assert [row.prompt for row in rows] == [" ".join(row) for row in zip(*columns, strict=True)]


def test_a_sampling_value_of_csv_may_be_written_in_any_way(scored: Scored, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("prompt,heat\na,0.70\nb,1E0\n")
    table = scored(tmp_path / "in.csv", sampling_columns={"temperature": "heat"})
    assert table["error"].to_pylist() == [None, None]
    assert table["heat"].to_pylist() == ["0.70", "1E0"]
    assert not table.field("heat").metadata


def test_a_bad_line_of_csv_costs_its_row_and_says_which_line_it_is(
    scored: Scored, tmp_path: Path
) -> None:
    content = b'prompt,n\na,1\nshort\n\nb,2,3\n"two\nlines",3\n"x"y,4\n\xff,5\nc,6\n'
    (tmp_path / "in.csv").write_bytes(content)
    rows = scored(tmp_path / "in.csv").to_pylist()
    assert len(rows) == 7
    assert [row["prompt"] for row in rows] == ["a", None, None, "two\nlines", None, None, "c"]
    assert [row["n"] for row in rows] == [1, None, None, 3, None, None, 6]
    errors = [row["error"] for row in rows]
    assert [errors[place] for place in (0, 3, 6)] == [None] * 3
    assert errors[1] == "line 3 has 1 fields, and the header 2"
    assert errors[2] == "line 5 has 3 fields, and the header 2"
    assert errors[4] is not None
    assert errors[4].startswith("line 8 is not CSV: ")
    assert errors[5] == "line 9 is not UTF-8"


def test_a_row_of_csv_that_does_not_end_costs_its_first_line_alone(
    scored: Scored, tmp_path: Path
) -> None:
    lines = [b"prompt,n", b"a,1", b'"never closed,2', b"b,3", b"x" * (MAX_LINE_BYTES + 1), b"c,4"]
    (tmp_path / "in.csv").write_bytes(b"\n".join(lines))
    rows = scored(tmp_path / "in.csv").to_pylist()
    assert [(row["prompt"], row["n"]) for row in rows] == [
        ("a", 1),
        (None, None),
        ("b", 3),
        (None, None),
        ("c", 4),
    ]
    assert rows[1]["error"].startswith("line 3 begins a row that has more than the limit")
    assert rows[3]["error"].startswith("line 5 has more than the limit of 8388608 bytes")
    for content, group in (
        (b'prompt\na\n"open\nb\n', (3, 10)),
        (b'prompt,n\n"a\nb",5" pipe\nc,d\n', (2, 18)),
    ):
        (tmp_path / "in.csv").write_bytes(content)
        assert [
            *map(tuple, scan(Storage([str(tmp_path)]), f"{tmp_path}/in.csv", "csv").groups)
        ] == [group]


@pytest.mark.parametrize("text", ['{"id": 1}\n{"id": 2.5}\n', "id\n1\n2.5\n"])
@pytest.mark.parametrize("template_format", ["fields", "jinja"])
def test_integers_beside_floats_keep_their_text_in_templates(
    scored: Scored, tmp_path: Path, text: str, template_format: str
) -> None:
    path = tmp_path / ("in.jsonl" if "{" in text else "in.csv")
    path.write_text(text)
    template = "row {{ id }}" if template_format == "jinja" else "row {id}"
    table = scored(path, template=template, template_format=template_format)
    assert table["completion"].to_pylist() == ["ROW 1", "ROW 2.5"]
    assert table["id"].to_pylist() == [1.0, 2.5]
    assert table.field("id") == pa.field("id", pa.float64())
    assert not table.field("id").metadata


def test_a_type_that_parquet_has_not_is_refused_before_anything_is_planned(
    make_context: MakeContext, tmp_path: Path
) -> None:
    column = pa.RunEndEncodedArray.from_arrays([2], [1])
    with pa.ipc.new_file(
        tmp_path / "in.arrow", pa.schema([("prompt", pa.string()), ("n", column.type)])
    ) as file:
        file.write_batch(pa.record_batch([pa.array(["a", "b"]), column], names=["prompt", "n"]))
    with pytest.raises(
        SchemaMismatch, match=r"'n' has type run_end_encoded.*which Parquet does not have"
    ):
        score(make_context(), tmp_path / "in.arrow", tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_bad_line_of_jsonl_costs_its_row_and_says_which_line_it_is(
    scored: Scored, tmp_path: Path
) -> None:
    lines = [
        b'{"prompt": "a", "n": 1}', b"{bad", b"", b"[1]", b"\xff", b'{"prompt": "\\ud800"}',
        b"[" * 100_000, b'{"prompt": "' + b"x" * MAX_LINE_BYTES + b'"}', b'{"prompt": "b", "extra": [1]}',
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    rows = scored(tmp_path / "in.jsonl").to_pylist()
    assert len(rows) == 8
    assert [row["completion"] for row in rows] == ["A", *[None] * 6, "B"]
    assert [row["extra"] for row in rows] == [*[None] * 7, [1]]
    starts = ["line 2 is not JSON", "line 4 is JSON, but no object", "line 5 is not UTF-8"]
    starts += ["line 6 is not valid Unicode", "line 7 is nested too deeply", "line 8 has more than"]
    for row, start in zip(rows[1:7], starts, strict=True):
        assert row["error"].startswith(start), row["error"]


def test_chats_and_values_of_several_kinds_in_jsonl(scored: Scored, tmp_path: Path) -> None:
    chats: list[Any] = [
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "parts"}]}],
    ]
    objects = [
        {
            "messages": chats[0],
            "plain": chats[0],
            "mixed": 1,
            "number": 1,
            "meta": {},
            "nested": {"a": [1]},
        },
        {
            "messages": chats[1],
            "plain": chats[0],
            "mixed": "1",
            "number": 2.5,
            "nested": {"b": None},
        },
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, objects)))
    rows = scored(tmp_path / "in.jsonl", messages_column="messages").to_pylist()
    assert [row["completion"] for row in rows] == [str(chat).upper() for chat in chats]
    assert [row["plain"] for row in rows] == [chats[0]] * 2
    assert [row["mixed"] for row in rows] == ["1", "1"]
    assert [row["number"] for row in rows] == [1.0, 2.5]
    assert [row["meta"] for row in rows] == ["{}", None]
    assert [row["nested"] for row in rows] == [{"a": [1], "b": None}, {"a": None, "b": None}]


@pytest.mark.parametrize(
    ("name", "content", "error", "text"),
    [
        ("in.csv", b"", CorruptTable, "empty"),
        ("in.csv", b'"prompt,n\nb,1\n', CorruptTable, "line 1 begins a quote that is not closed"),
        ("in.csv", b"prompt,prompt\na,b\n", SchemaMismatch, "two columns named 'prompt'"),
        (
            "in.csv",
            "prompt\na\n".encode("utf-16"),
            OtherEncoding,
            "looks like utf-16: set encoding",
        ),
        ("in.csv", b"text\na\n", MissingColumn, "'prompt'"),
        ("in.jsonl", b'{"text": 1}\n', MissingColumn, "'text'"),
        ("in.jsonl", b"", MissingColumn, "'prompt' in .* the file holds no columns"),
        ("in.jsonl", b'[{"prompt": "a"},\n{"prompt": "b"}]\n', TooManyBadLines, "2 of its 2 rows"),
        (
            "in.jsonl",
            b'{\n "prompt": "a"\n}\n',
            TooManyBadLines,
            "line 1, which is not JSON: Expecting property name",
        ),
        (
            "in.jsonl",
            b'{"prompt": "a"}\r{"prompt": "b"}\r',
            TooManyBadLines,
            "line 1, which is not JSON: Extra data",
        ),
        (
            "in.jsonl",
            b'{"custom_id": "a", "method": "POST", "url": "/", "body": {}}',
            MissingColumn,
            "openai-batch",
        ),
        (
            "in.csv",
            b"prompt,n\ra,1\rb,2\r",
            CorruptTable,
            r"line 1 has a carriage return \(.r\) outside quotes",
        ),
        ("in.tsv", b"prompt,n\na,1\n", OtherDelimiter, "--delimiter ','"),
        (
            "in.jsonl.gz",
            gzip.compress(b'{"prompt": "a"}\n' * 100, mtime=0)[:-20],
            CorruptTable,
            "in.jsonl.gz",
        ),
        ("in.arrow", b"ARROW1\0\0 and more of it", CorruptTable, "arrow"),
        ("in.arrow", b"", CorruptTable, "arrow"),
    ],
)
def test_what_costs_a_file_is_named(
    make_context: MakeContext,
    tmp_path: Path,
    name: str,
    content: bytes,
    error: type[Exception],
    text: str,
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=text):
        score(make_context(), tmp_path / name, tmp_path)


def test_columns_of_several_levels_are_to_be_flattened(
    make_context: MakeContext, tmp_path: Path
) -> None:
    file = tmp_path / "in.parquet"
    frame = pd.DataFrame({("prompt", ""): ["a"], ("length", "words"): [1]})
    frame.to_parquet(file)
    flattening = "frame.columns = ['_'.join(map(str, name)) for name in frame.columns]"
    with pytest.raises(MissingColumn, match=re.escape(f"flatten them: {flattening})")):
        score(make_context(), file, tmp_path)
    frame.columns = ["_".join(map(str, name)) for name in frame.columns]
    frame.to_parquet(file)
    with pytest.raises(MissingColumn, match="the file holds 'prompt_', 'length_words'; name one"):
        score(make_context(), file, tmp_path)


def test_a_damaged_arrow_file_ends_in_a_named_error_wherever_it_is_damaged(
    make_context: MakeContext, tmp_path: Path
) -> None:
    whole = write_stream(tmp_path / "whole.arrows").read_bytes()
    footed = write_feather(tmp_path / "whole.feather").read_bytes()
    storage = Storage([str(tmp_path)])
    for number, content in enumerate((whole, footed)):
        for place in range(0, len(content), 37):
            damaged = bytearray(content)
            damaged[place : place + 4] = b"\xff\x7f\xff\xff"
            path = tmp_path / f"{number}-{place}.arrow"
            path.write_bytes(damaged)
            with suppress(CorruptTable, SchemaMismatch, TableNotRead):
                scan(storage, str(path), "arrow")


def test_a_file_that_changes_is_scored_as_it_was_planned_and_refused_where_it_is_planned_again(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl")
    score(make_context(), source, tmp_path)
    content, times = source.read_bytes(), source.stat()
    source.write_bytes(content.replace(b'"p22"', b'"q22"'))  # of the same size, in the last shard
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    with pytest.raises(InputChanged, match="other contents"):
        score(make_context(), source, tmp_path)
    work_off(redis, make_context)
    assert [row["completion"] for row in read_rows(tmp_path / "out")] == [
        f"P{number}" for number in range(23)
    ]


def test_files_of_a_run_share_one_schema(
    scored: Scored, make_context: MakeContext, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("prompt,n\na,1\n")
    (tmp_path / "in" / "b.csv.gz").write_bytes(gzip.compress(b"prompt,n\nb,2.5\n"))
    (tmp_path / "in" / "notes.txt").write_text("no input")
    assert [(row["completion"], row["n"]) for row in scored(tmp_path / "in").to_pylist()] == [
        ("A", 1.0),
        ("B", 2.5),
    ]
    (tmp_path / "in" / "c.csv").write_text("n,prompt\n1,c\n")
    with pytest.raises(SchemaMismatch, match=r"c\.csv: its header is \['n', 'prompt'\]"):
        score_parquet(make_context(), str(tmp_path / "in"), str(tmp_path / "other"))


def test_a_limit_looks_at_no_row_behind_it(scored: Scored, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("prompt,n\n" + "a,1\n" * 7 + "b,x\n" * 3)
    assert [row["n"] for row in scored(tmp_path / "in.csv", limit=7).to_pylist()] == [1] * 7


def test_columns_are_chosen_and_added_as_for_parquet(scored: Scored, tmp_path: Path) -> None:
    for lang in ("de", "en"):
        (tmp_path / "in" / f"lang={lang}").mkdir(parents=True)
        write_jsonl(tmp_path / "in" / f"lang={lang}" / "x.jsonl")
    rows = scored(
        tmp_path / "in", template="{lang}", prompt_column="prompt", keep=["id"]
    ).to_pylist()
    assert [row["completion"] for row in rows] == ["DE"] * 23 + ["EN"] * 23
    assert [row["id"] for row in rows] == [*range(23)] * 2
    assert "prompt" not in rows[0]


def names_found(tmp_path: Path, item: str, input_format: str | None = None) -> list[str]:
    found = find_files(Storage([str(tmp_path)]), [item], f"{tmp_path}/out", input_format)
    return [os.path.basename(file.path) for file in found]


def test_a_folder_gives_files_of_one_format(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv.gz", "c.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(MixedFormats, match=r"c\.jsonl is jsonl by its name, and .*a\.csv is csv"):
        names_found(tmp_path, str(tmp_path))
    assert names_found(tmp_path, str(tmp_path), "csv") == ["a.csv", "b.csv.gz"]
    (tmp_path / "d.parquet").touch()
    assert names_found(tmp_path, str(tmp_path)) == ["d.parquet"]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "e.csv").touch()
    assert names_found(tmp_path, str(tmp_path)) == ["d.parquet"]
    with pytest.raises(NestedFolders, match=r"sub/e\.csv: name '.*/\*\*/\*\.csv'"):
        names_found(tmp_path, str(tmp_path), "csv")


def test_the_name_of_a_link_tells_the_format(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    """As in the cache of Hugging Face's hub."""
    write_jsonl(tmp_path / "in.jsonl").rename(tmp_path / "0123abc")
    (tmp_path / "in.jsonl").symlink_to(tmp_path / "0123abc")
    assert score(make_context(), tmp_path / "in.jsonl", tmp_path)["rows"] == 23


def test_an_input_format_is_taken_for_any_name_and_refused_by_name(
    redis: Redis, make_context: MakeContext, tmp_path: Path, invoke: Invoke
) -> None:
    write_jsonl(tmp_path / "in.json")
    assert score(make_context(), tmp_path / "in.json", tmp_path, input_format="jsonl")["rows"] == 23
    with pytest.raises(InvalidValue, match="input_format is 'xml', expected 'parquet' or 'csv'"):
        score(make_context(), tmp_path / "in.json", tmp_path, input_format="xml")
    result = invoke("submit", tmp_path / "in.json", tmp_path / "o", "--input-format", "xml")
    assert result.exit_code == 2
    assert "--input-format" in invoke("submit", "--help").output
    (tmp_path / "in.csv").write_text("text\na\n")
    write_feather(tmp_path / "in.feather")
    result = invoke("submit", tmp_path / "in.feather", tmp_path / "o", "--prompt-column", "text")
    assert "no column 'text'" in result.output


def test_two_runs_of_one_file_that_see_other_columns_in_it_share_no_reader(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_text("prompt,n\n" + "a,1\n" * 5 + "b,x\n")
    shared = SharedFiles()

    def make() -> JobContext:
        return replace(make_context(), files=shared)

    score_parquet(make(), f"{tmp_path}/in.csv", f"{tmp_path}/one", limit=5, rows_per_shard=2)
    first, second, _ = queued_jobs(redis)
    held = opened_task(make(), second.func_name, second.args)  # keeps the file's readers open
    run_task(make(), first.func_name, *first.args)
    score_parquet(make(), f"{tmp_path}/in.csv", f"{tmp_path}/two", rows_per_shard=2)
    for job in queued_jobs(redis)[:2:-1]:
        run_task(make(), job.func_name, *job.args)
    held.close()
    work_off(redis, make)
    assert pq.read_table(tmp_path / "one")["n"].to_pylist() == [1] * 5
    assert pq.read_table(tmp_path / "two")["n"].to_pylist() == [*["1"] * 5, "x"]


def test_numbers_that_json_has_not_and_keys_that_stand_twice_are_read_as_documented(
    runs: Runs, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"n": NaN, "list": [Infinity], "twice": 1, "twice": 2}\n')
    runs.plan(tmp_path / "in.jsonl", template="{n} {list} {twice}", single_file="jsonl")
    runs.work()
    table = pq.read_table(tmp_path / "out" / "_parts")
    assert table["completion"].to_pylist() == ["NAN [NULL] 2"]
    assert math.isnan(table["n"][0].as_py())
    row = json.loads((tmp_path / "out" / "output.jsonl").read_text())
    assert (row["n"], row["list"], row["twice"]) == (None, [None], 2)
    (tmp_path / "in.csv").write_text("n\nNaN\n")
    assert runs.score(tmp_path / "in.csv", output=tmp_path / "csv", template="{n} is")[
        "n"
    ].to_pylist() == ["NaN"]


WORDS = ["Müller", "plain", "Größe", "café", "“quoted”"]


def words(kind: str, count: int = 40) -> str:
    rows = [WORDS[number % len(WORDS)] for number in range(count)]
    if kind == "jsonl":
        return "".join(json.dumps({"prompt": row}, ensure_ascii=False) + "\n" for row in rows)
    return "\n".join(["prompt,n", *(f"{row},1" for row in rows)]) + "\n"


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("cp1252", "cp1252"),
        ("utf-16", "utf-16"),
        ("utf-16-le", "utf-16-le"),
        ("utf-16-be", "utf-16-be"),
        ("utf-32", "utf-32"),
    ],
)
def test_a_file_in_another_encoding_is_refused_by_its_name_and_read_when_that_is_said(
    scored: Scored, make_context: MakeContext, tmp_path: Path, kind: str, written: str, named: str
) -> None:
    path = tmp_path / f"in.{kind}"
    path.write_bytes(words(kind).encode(written))
    with pytest.raises(OtherEncoding, match=f"looks like {named}: .*--encoding {named}"):
        score(make_context(), path, tmp_path)
    assert not (tmp_path / "out").exists()
    table = scored(path, encoding=named)
    assert table["prompt"].to_pylist() == [WORDS[number % len(WORDS)] for number in range(40)]
    assert table["error"].null_count == 40


@pytest.mark.parametrize("written", ["utf-16-le", "utf-16-be", "utf-8"])
def test_an_encoding_that_needs_a_byte_order_mark_says_so_if_there_is_none(
    make_context: MakeContext, tmp_path: Path, written: str
) -> None:
    (tmp_path / "in.csv").write_bytes(words("csv").encode(written))
    with pytest.raises(
        CorruptTable,
        match="no byte order mark, which encoding utf-16 needs: if it is written as utf-16-le",
    ):
        score(make_context(), tmp_path / "in.csv", tmp_path, encoding="utf-16")


def test_few_lines_of_cp1252_are_enough_and_utf_8_may_be_insisted_on(
    scored: Scored, make_context: MakeContext, tmp_path: Path
) -> None:
    lines = [b"prompt", *[b"plain"] * 60, "Müller".encode("cp1252")]
    (tmp_path / "in.csv").write_bytes(b"\n".join(lines))
    with pytest.raises(OtherEncoding, match="looks like cp1252"):
        score(make_context(), tmp_path / "in.csv", tmp_path)
    found = scored(tmp_path / "in.csv", encoding="UTF-8", output=tmp_path / "told")[
        "error"
    ].to_pylist()
    assert found == [None] * 60 + ["line 62 is not UTF-8"]
    (tmp_path / "in.csv").write_bytes(
        b"\n".join([*lines, "Größe".encode()])
    )  # so it is UTF-8, with a bad line
    found = scored(tmp_path / "in.csv", output=tmp_path / "mixed")["error"].to_pylist()
    assert found == [None] * 60 + ["line 62 is not UTF-8", None]


def test_what_an_encoding_has_not_costs_its_line(scored: Scored, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes("prompt\nkäse\n".encode("cp1252") + b"\x81\nb\n")
    table = scored(tmp_path / "in.csv", encoding="cp1252")
    assert table["completion"].to_pylist() == ["KÄSE", None, "B"]
    assert table["error"].to_pylist() == [None, "line 3 is not cp1252", None]
    (tmp_path / "in.jsonl").write_bytes('{"prompt": "a"}\n'.encode("utf-16-le") + b"\x00\xd8\n\x00")
    table = scored(tmp_path / "in.jsonl", encoding="utf-16-le", output=tmp_path / "lines")
    assert table["error"].to_pylist() == [None, "line 2 is not utf-16-le"]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("bad", "rows", "is_refused"), [(3, 20, True), (2, 20, False), (4, 7, False), (11, 101, True)]
)
def test_a_file_of_which_more_than_a_tenth_of_the_lines_cannot_be_read_is_refused(
    scored: Scored,
    make_context: MakeContext,
    tmp_path: Path,
    kind: str,
    bad: int,
    rows: int,
    is_refused: bool,
) -> None:
    good, broken = ('{"prompt": "a"}', "{") if kind == "jsonl" else ("a,1", "a,b,c")
    lines = [*(["prompt,n"] if kind == "csv" else []), *[good] * (rows - bad), *[broken] * bad]
    path = tmp_path / f"in.{kind}"
    path.write_text("\n".join(lines))
    if is_refused:
        first = rows - bad + 1 + (kind == "csv")
        with pytest.raises(
            TooManyBadLines,
            match=f"{bad} of its {rows} rows cannot be read.* The first is line {first},",
        ):
            score(make_context(), path, tmp_path)
    else:
        assert scored(path)["error"].null_count == rows - bad


@pytest.mark.parametrize(("delimiter", "said"), [(";", ";"), ("\t", "\\t"), ("|", "|")])
def test_another_delimiter_is_named_and_read_when_it_is_said(
    scored: Scored, make_context: MakeContext, tmp_path: Path, delimiter: str, said: str
) -> None:
    rows = [["prompt", "n", "price"], ["a, b", "1", "1,50"], ['"c;|\t"', "2", "2,5"]]
    (tmp_path / "in.csv").write_text("\n".join(delimiter.join(row) for row in rows))
    with pytest.raises(OtherDelimiter, match="looks separated by") as raised:
        score(make_context(), tmp_path / "in.csv", tmp_path)
    assert f"--delimiter '{said}'" in str(raised.value)
    table = scored(tmp_path / "in.csv", delimiter=said)
    assert table["prompt"].to_pylist() == ["a, b", "c;|\t"]
    assert table["n"].to_pylist() == [1, 2]
    assert table["price"].to_pylist() == ["1,50", "2,5"]


@pytest.mark.parametrize("column", ["n", "Größe"])
def test_a_file_of_a_european_excel_is_told_its_delimiter_and_its_encoding_at_once(
    make_context: MakeContext, tmp_path: Path, column: str
) -> None:
    content = f"prompt;{column}\nplain;1\nMüller;2\n"
    (tmp_path / "in.csv").write_bytes(content.encode("cp1252"))
    with pytest.raises(
        OtherDelimiter, match=r"--delimiter ';'\) and encoding \(--encoding cp1252\)"
    ):
        score(make_context(), tmp_path / "in.csv", tmp_path)
    (tmp_path / "in.csv").write_text(content)
    with pytest.raises(OtherDelimiter, match=r"--delimiter ';'\), or write"):
        score(make_context(), tmp_path / "in.csv", tmp_path)


def test_a_line_that_tells_excel_the_delimiter_is_no_row(scored: Scored, tmp_path: Path) -> None:
    for number, line in enumerate(("sep=;", '"sep=;"\r', "SEP=;")):
        (tmp_path / "in.csv").write_bytes(f"\ufeff{line}\nprompt;n\nx;1\n".encode())
        table = scored(tmp_path / "in.csv", output=tmp_path / f"out{number}")
        assert (table["prompt"].to_pylist(), table["n"].to_pylist()) == (["x"], [1])


@pytest.mark.parametrize("template_format", ["fields", "jinja"])
def test_decimal_commas_are_numbers_in_the_output_and_stand_in_templates_as_in_the_file(
    scored: Scored, tmp_path: Path, template_format: str
) -> None:
    (tmp_path / "in.csv").write_text(
        "half;mixed;zeros;point;heat;sum;long;most\n"
        "0,5;1;1,50;1.5;0,70;1.234,56;12345678901234567890;1.024\n"
        "-2,25;2,5;3;2.5;1;7,00;2,5;8\n"
    )
    names = ("half", "mixed", "zeros", "point", "sum", "long")
    template = " ".join(
        f"{{{{ {name} }}}}" if template_format == "jinja" else f"{{{name}}}" for name in names
    )
    options = {
        "template": template,
        "template_format": template_format,
        "sampling_columns": {"temperature": "heat", "max_tokens": "most"},
    }
    table = scored(tmp_path / "in.csv", delimiter=";", decimal=",", **options)
    assert table["error"].to_pylist() == [None, None]
    assert table["completion"].to_pylist() == [
        "0,5 1 1,50 1.5 1.234,56 12345678901234567890",
        "-2,25 2,5 3 2.5 7,00 2,5",
    ]
    assert [table[name].to_pylist() for name in names] == [
        [0.5, -2.25],
        [1.0, 2.5],
        [1.5, 3.0],
        ["1.5", "2.5"],
        [1234.56, 7.0],
        ["12345678901234567890", "2,5"],
    ]
    assert table["most"].to_pylist() == [1024.0, 8.0]
    assert not any(table.field(name).metadata for name in names)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"encoding": "klingon"}, "encoding is 'klingon', expected an encoding of text"),
        ({"encoding": "base64"}, "encoding is 'base64', expected"),
        ({"delimiter": ";;"}, "delimiter is ';;', expected one character"),
        ({"decimal": ";"}, "decimal is ';', expected the point or the comma"),
    ],
)
def test_a_dialect_that_cannot_be_is_refused(
    make_context: MakeContext, tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    (tmp_path / "in.csv").write_text("prompt\na\n")
    with pytest.raises(InvalidValue, match=text):
        score(make_context(), tmp_path / "in.csv", tmp_path, **options)


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "ascii"])
def test_a_file_with_the_mark_of_utf8_is_refused_in_an_encoding_of_single_bytes(
    make_context: MakeContext, tmp_path: Path, encoding: str
) -> None:
    (tmp_path / "in.csv").write_text("prompt\nschön\n", encoding="utf-8-sig")
    with pytest.raises(
        MarkedAsUTF8, match=r"in.csv begins with UTF-8's byte order mark.* leave encoding out"
    ):
        score(make_context(), tmp_path / "in.csv", tmp_path / "out", encoding=encoding)
    score(make_context(), tmp_path / "in.csv", tmp_path / "out", encoding="utf-8-sig")


def test_a_dialect_is_of_files_of_text_alone(make_context: MakeContext, tmp_path: Path) -> None:
    write_feather(tmp_path / "in.feather")
    write_jsonl(tmp_path / "in.jsonl")
    with pytest.raises(
        InvalidJob, match=r"encoding is for csv, .* and the input is arrow: leave it out"
    ):
        score(make_context(), tmp_path / "in.feather", tmp_path, encoding="cp1252")
    with pytest.raises(
        InvalidJob, match="delimiter is for csv, tsv files, and the input is jsonl: leave it out"
    ):
        score(make_context(), tmp_path / "in.jsonl", tmp_path, delimiter=";")
    (tmp_path / "from_excel.txt").write_text("prompt;n\na;1\n")
    with pytest.raises(InvalidJob, match=r"the input is parquet: .* \(--input-format\)"):
        score(make_context(), tmp_path / "from_excel.txt", tmp_path, delimiter=";")
