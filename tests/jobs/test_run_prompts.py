"""What becomes a row's prompt: a column, a template, a chat; and a row that gives none costs itself alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from redis import Redis

from jobs.context import JobContext
from jobs.tasks import Request
from tests.jobs.answering import (
    FakeCompletion,
    refuse,
    score_parquet,
    shout,
    work_off,
)
from tests.jobs.input_files import read_rows, write_prompts

MakeContext = Callable[[], JobContext]
GREEDY = {"temperature": 0}


def test_bad_rows_get_an_error_and_the_rest_goes_on(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a", None, "", "long", "b", "x" * (1 << 20) + "y"])
    score_parquet(make_context(), source, str(tmp_path / "out"))
    work_off(
        redis,
        make_context,
        answer=lambda request: refuse("prompt too long") if request.prompt == "long" else shout(request),
    )
    rows = read_rows(tmp_path / "out")
    assert [row["completion"] for row in rows] == ["A", None, None, None, "B", None]
    assert [row["finish_reason"] for row in rows] == ["stop", "error", "error", "error", "stop", "error"]
    errors = [row["error"] for row in rows]
    assert errors[:5] == [None, "prompt is null", "prompt is empty", "prompt too long", None]
    assert "limit" in errors[5]
    assert json.loads((tmp_path / "out" / "_manifest.json").read_text())["errors"] == 4


def test_a_text_that_is_not_utf8_is_its_rows_error(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    broken = pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": broken}), tmp_path / "in.parquet")
    score_parquet(make_context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"))
    work_off(redis, make_context)
    table = pq.read_table(tmp_path / "out")
    assert table["completion"].to_pylist() == ["FINE", None]
    assert "UTF-8" in table["error"].to_pylist()[1]
    assert table["prompt"].cast(pa.binary()).to_pylist() == [b"fine", b"\xff\xfe"]


def test_a_value_that_python_cannot_hold_is_its_rows_error(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    days = pa.array([0, 10**8, None], pa.date32())
    zoned = pa.array([1, 1, 1], pa.timestamp("us", tz="Mars/Olympus"))
    pq.write_table(pa.table({"day": days, "zoned": zoned, "id": [0, 1, 2]}), tmp_path / "in.parquet")
    for output, template in (("days", "on {day}"), ("zoned", "at {zoned}")):
        score_parquet(make_context(), str(tmp_path / "in.parquet"), str(tmp_path / output), template=template)
        work_off(redis, make_context)
    table = pq.read_table(tmp_path / "days")
    assert table["completion"].to_pylist() == ["ON 1970-01-01", None, None]
    assert "date32" in table["error"].to_pylist()[1]
    assert table["error"].to_pylist()[2] == "column 'day' is null"
    assert table["day"].equals(pq.read_table(tmp_path / "in.parquet")["day"])
    assert all("timestamp" in error for error in pq.read_table(tmp_path / "zoned")["error"].to_pylist())


def test_templates_fill_in_columns_and_leave_the_datas_braces_alone(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["{id}", None], price=[1.5, 2.5])
    score_parquet(make_context(), source, str(tmp_path / "out"), template="{{{id}}} {prompt} costs {price}")
    work_off(redis, make_context)
    rows = read_rows(tmp_path / "out")
    assert rows[0]["completion"] == "{0} {ID} COSTS 1.5"
    assert rows[1]["error"] == "column 'prompt' is null"


def test_a_template_of_messages_makes_a_chat(redis: Redis, make_context: MakeContext, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["hi"])
    template = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "<{prompt}>"}]
    score_parquet(make_context(), source, str(tmp_path / "out"), template=template)
    seen: list[Request] = []
    work_off(redis, make_context, answer=lambda request: seen.append(request) or FakeCompletion("ok"))
    (request,) = seen
    assert request.prompt is None
    assert request.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "<hi>"},
    ]


def test_messages_may_be_structs_or_json(redis: Redis, make_context: MakeContext, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    table = pa.table(
        {
            "structs": [chat, None, [], [{"role": "user", "content": None}]],
            "texts": [json.dumps(chat), "{", '"x"', "[" * 100_000],
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    for column in ("structs", "texts"):
        output = tmp_path / f"out-{column}"
        score_parquet(make_context(), str(tmp_path / "in.parquet"), str(output), messages_column=column)
        work_off(redis, make_context, answer=lambda request: FakeCompletion(json.dumps(request.messages)))
        rows = read_rows(output)
        assert json.loads(rows[0]["completion"]) == chat
        assert [row["completion"] for row in rows[1:]] == [None] * 3
        assert all(row["error"] for row in rows[1:])


def test_a_content_may_be_parts_of_text_and_an_image_is_its_rows_error(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    """As structs, whose other fields are null where a part is text, and as JSON."""
    part = {"type": "text", "text": "hi", "image_url": None}
    image = {"type": "image_url", "text": None, "image_url": "file:///etc/passwd"}
    chats = [[{"role": "user", "content": content}] for content in ([part, part], [part, image], [])]
    table = pa.table(
        {"structs": chats, "texts": [json.dumps(chat).replace(', "image_url": null', "") for chat in chats]}
    )
    pq.write_table(table, tmp_path / "in.parquet")
    for column in ("structs", "texts"):
        output = tmp_path / f"out-{column}"
        score_parquet(make_context(), str(tmp_path / "in.parquet"), str(output), messages_column=column)
        work_off(redis, make_context, answer=lambda request: FakeCompletion(json.dumps(request.messages)))
        two, bad, empty = read_rows(output)
        assert json.loads(two["completion"])[0]["content"] == [{"type": "text", "text": "hi"}] * 2
        assert bad["completion"] is None
        assert "message 0 holds a part of the type 'image_url'" in bad["error"]
        assert json.loads(empty["completion"])[0]["content"] == []
