"""Files and batches by OpenAI's client: upload, create, poll, read, cancel, delete."""

import io
import json
import time
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
from openai.types import Batch
from openai.types.responses import Response

from jobs.common.keys import API_BATCHES_KEY
from tests.rq_workers import wait_until
from tests.tokenmill.server.conftest import Served
from tokenmill.server.batches.batch_runs import Batches
from tokenmill.server.batches.file_store import FileStore
from tokenmill.server.batches.folders import LocalFolder

#: How many lines a part holds.
ROWS_PER_SHARD = 1000


def line(name: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": f"prompt {name}", "max_tokens": 2, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def upload(served: Served, lines: list[Any]) -> str:
    data = "".join(json.dumps(each) + "\n" for each in lines).encode()
    file = served.client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    assert file.bytes == len(data)
    assert served.client.files.content(file.id).read() == data
    return file.id


def create(served: Served, file_id: str, **options: Any) -> Batch:
    arguments = {"endpoint": "/v1/completions", "completion_window": "24h", **options}
    return served.client.batches.create(input_file_id=file_id, **arguments)


def ended(served: Served, batch: Batch, status: str = "completed") -> Batch:
    until = time.monotonic() + 60
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < until, batch
        batch = served.client.batches.retrieve(batch.id)
    assert batch.status == status, batch
    return batch


def lines_of(served: Served, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(each) for each in served.client.files.content(file_id).text.splitlines()]


def test_a_line_that_names_a_file_of_the_workers_goes_to_the_errors(served: Served) -> None:
    secret = served.folder / "secret.png"
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_bytes(b"secret")
    asked: list[Any] = [line("a"), line("b")]
    content = [{"type": "image_url", "image_url": {"url": str(secret)}}]
    asked[1]["url"] = "/v1/chat/completions"
    asked[1]["body"] = {"messages": [{"role": "user", "content": content}]}
    batch = ended(served, create(served, upload(served, asked)))
    assert [each["custom_id"] for each in lines_of(served, batch.output_file_id)] == ["a"]
    (failed,) = lines_of(served, batch.error_file_id)
    assert "no data: URL" in failed["error"]["message"]


@pytest.mark.parametrize("beginning", [b"\x1f\x8b\x08\x00", b"\x28\xb5\x2f\xfd", b"BZh9"])
def test_a_compressed_file_makes_no_batch(served: Served, beginning: bytes) -> None:
    file = served.client.files.create(file=("in", io.BytesIO(beginning)), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="compressed"):
        create(served, file.id)


def test_each_line_is_once_in_output_or_errors_in_the_files_order(served: Served) -> None:
    asked = [line(f"a{number}") for number in range(20)]
    asked[3] = line("bad", max_tokens=-1)
    asked[11] = line("refused", prompt="refuse")
    batch = create(served, upload(served, asked), metadata={"team": "x"})
    assert batch.status == "validating"
    assert batch.metadata == {"team": "x"}

    batch = ended(served, batch)
    answered = lines_of(served, batch.output_file_id)
    failed = lines_of(served, batch.error_file_id)
    names = [each["custom_id"] for each in asked]
    assert [each["custom_id"] for each in answered] == [
        name for name in names if name not in ("bad", "refused")
    ]
    assert [each["custom_id"] for each in failed] == ["bad", "refused"]
    assert answered[0]["response"]["body"]["choices"][0]["text"] == "echo:prompt a0"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (20, 18, 2)
    assert batch.usage is not None
    assert batch.usage.output_tokens == 36


def test_a_batch_in_which_each_line_is_invalid_is_completed(served: Served) -> None:
    batch = ended(served, create(served, upload(served, [line("a", max_tokens=-1)])))
    assert batch.output_file_id is None
    assert [each["custom_id"] for each in lines_of(served, batch.error_file_id)] == ["a"]


def test_a_file_that_cannot_be_read_fails_the_batch_with_the_reason(served: Served) -> None:
    file = served.client.files.create(file=("x", io.BytesIO(b"\xff\xfe\xff")), purpose="batch")
    batch = ended(served, create(served, file.id), status="failed")
    assert batch.errors is not None
    assert batch.errors.data
    assert file.id in (batch.errors.data[0].message or "")


def test_no_batch_is_made_of_an_empty_file(served: Served) -> None:
    file = served.client.files.create(file=("x", io.BytesIO(b"")), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="no lines"):
        create(served, file.id)


def test_a_batch_takes_the_answers_of_earlier_ones_if_it_asks_for_that(served: Served) -> None:
    file_id = upload(served, [line("once")])
    ended(served, create(served, file_id))
    batch = ended(served, create(served, file_id, metadata={"reuse": "true"}))
    assert [each["custom_id"] for each in lines_of(served, batch.output_file_id)] == ["once"]
    manifest = served.folder / "default" / "batches" / batch.id / "run" / "_manifest.json"
    assert json.loads(manifest.read_text())["rows_reused"] == 1


def test_a_cancelled_batch_ends_cancelled(served: Served) -> None:
    batch = create(served, upload(served, [line("slow", prompt="hang")]))
    batch = served.client.batches.cancel(batch.id)
    assert batch.cancelling_at is not None
    batch = ended(served, batch, status="cancelled")
    assert served.client.batches.cancel(batch.id).status == "cancelled"


def test_a_cancelled_batch_has_the_lines_that_were_answered(served: Served) -> None:
    asked = [line(f"a{number}") for number in range(ROWS_PER_SHARD)]
    asked[7] = line("refused", prompt="refuse")
    asked += [line("slow", prompt="hang")]
    batch = create(served, upload(served, asked))
    parts = served.folder / "default" / "batches" / batch.id / "run" / "_parts"
    wait_until(lambda: list(parts.glob("part-*.parquet")))
    served.client.batches.cancel(batch.id)
    batch = ended(served, batch, status="cancelled")
    names = [each["custom_id"] for each in lines_of(served, batch.output_file_id)]
    assert names == [f"a{number}" for number in range(ROWS_PER_SHARD) if number != 7]
    (failed,) = lines_of(served, batch.error_file_id)
    assert failed["custom_id"] == "refused"
    assert failed["id"].endswith("_7")


def test_lines_of_responses_are_answered_with_response_objects(served: Served) -> None:
    lines = []
    for name in ("a", "b"):
        body = {"input": f"hello {name}", "instructions": "be brief", "max_output_tokens": 3}
        lines.append({"custom_id": name, "method": "POST", "url": "/v1/responses", "body": body})
    lines[1]["body"]["store"] = True
    batch = ended(served, create(served, upload(served, lines), endpoint="/v1/responses"))
    (answered,) = lines_of(served, batch.output_file_id)
    response = Response.model_validate(answered["response"]["body"])
    asked = served.client.responses.create(
        model="fake", input="hello a", instructions="be brief", max_output_tokens=3
    )
    assert response.output_text == asked.output_text
    assert response.instructions == "be brief"
    assert response.usage == asked.usage
    (failed,) = lines_of(served, batch.error_file_id)
    assert failed["error"]["message"] == "store is not built: leave it out"


def test_lines_that_were_not_begun_within_the_window_are_expired(served: Served) -> None:
    two_hours_ago = time.time() - 7200
    batches = Batches(
        served.redis, FileStore(LocalFolder(served.folder)), "bulk", clock=lambda: two_hours_ago
    )
    asked = {"endpoint": "/v1/completions", "completion_window": "1h"}
    asked["input_file_id"] = upload(served, [line("a"), line("b")])
    created = batches.create("default", asked)

    batch = ended(served, served.client.batches.retrieve(created["id"]), status="expired")
    assert batch.expired_at is not None
    assert batch.completed_at is None
    assert batch.request_counts is not None
    assert batch.request_counts.failed == 2
    assert batch.output_file_id is None
    errors = [each["error"] for each in lines_of(served, batch.error_file_id)]
    assert [error["code"] for error in errors] == ["batch_expired"] * 2
    for key in served.redis.keys("tokenmill:run:*"):
        served.redis.delete(key)
    assert served.client.batches.retrieve(batch.id).status == "expired"


def test_a_batch_outlives_what_redis_knows_of_it(served: Served) -> None:
    batch = create(served, upload(served, [line("a"), line("b")]))
    finished = ended(served, batch)
    waiting = create(served, upload(served, [line("c", prompt="hang")]))
    cancelled = create(served, upload(served, [line("d", prompt="hang")]))
    ended(served, served.client.batches.cancel(cancelled.id), status="cancelled")

    for key in served.redis.keys("tokenmill:run:*"):
        served.redis.delete(key)
    again = served.client.batches.retrieve(batch.id)
    assert again.status == "completed"
    assert again.output_file_id == finished.output_file_id
    assert again.request_counts == finished.request_counts
    assert served.client.batches.retrieve(cancelled.id).status == "cancelled"
    # It is submitted and planned again.
    wait_until(lambda: served.client.batches.retrieve(waiting.id).status == "in_progress")
    ended(served, served.client.batches.cancel(waiting.id), status="cancelled")


def test_lists_go_on_behind_a_cursor_the_latest_first(served: Served) -> None:
    ids = [upload(served, [line(str(number))]) for number in range(3)]
    page = served.client.files.list(limit=2)
    assert [each.id for each in page.data] == [ids[2], ids[1]]
    assert page.has_more
    following = served.client.files.list(limit=1, after=ids[1])
    assert following.data[0].id == ids[0]


def test_a_deleted_file_is_gone(served: Served) -> None:
    file_id = upload(served, [line("a")])
    assert served.client.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError):
        served.client.files.retrieve(file_id)
    with pytest.raises(openai.NotFoundError):
        create(served, file_id)


def test_a_part_of_a_file_can_be_read(served: Served) -> None:
    file_id = upload(served, [line("a")])
    content = served.client.files.with_raw_response.content(
        file_id, extra_headers={"range": "bytes=1-9"}
    )
    assert content.status_code == 206
    assert content.content == b'"custom_i'


@pytest.mark.parametrize(
    "options",
    [
        {"endpoint": "/v1/images/generations"},
        {"completion_window": "30m"},
        {"completion_window": "8d"},
        {"metadata": {"a": "x" * 513}},
        {"input_file_id": "../../../etc/passwd"},
        {"input_file_id": "file-" + "0" * 28},
    ],
)
def test_a_batch_that_cannot_be_is_refused(served: Served, options: dict[str, Any]) -> None:
    file_id = options.pop("input_file_id", None) or upload(served, [line("a")])
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
        create(served, file_id, **options)


def test_an_upload_that_is_cut_leaves_nothing(served: Served) -> None:
    files = served.folder / "default" / "files"
    upload(served, [line("a")])
    before = sorted(path.name for path in files.iterdir())
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf'
    headers = {"content-type": "multipart/form-data; boundary=x"}
    request = urllib.request.Request(f"{served.address}/v1/files", body, headers)
    with pytest.raises(urllib.error.HTTPError, match="Bad Request"):
        urllib.request.urlopen(request, timeout=30)
    assert sorted(path.name for path in files.iterdir()) == before


def test_a_cancelled_batch_whose_parts_cannot_be_read_hides_no_other_batch(served: Served) -> None:
    asked = [line(f"a{number}") for number in range(ROWS_PER_SHARD)]
    asked += [line("slow", prompt="hang")]
    batch = create(served, upload(served, asked))
    parts = served.folder / "default" / "batches" / batch.id / "run" / "_parts"
    wait_until(lambda: list(parts.glob("part-*.parquet")))
    (part,) = parts.glob("part-*.parquet")
    part.unlink()
    part.write_bytes(b"damaged")
    served.client.batches.cancel(batch.id)
    batch = ended(served, batch, status="cancelled")
    assert batch.output_file_id is None
    assert batch.id in [each.id for each in served.client.batches.list().data]


def test_a_cancelled_batch_stays_so_if_its_planning_ends_after_redis_lost_the_run(
    served: Served,
) -> None:
    batch = create(served, upload(served, [line("a", prompt="hang")]))
    batch = ended(served, served.client.batches.cancel(batch.id), status="cancelled")
    for entry in served.redis.zrange(API_BATCHES_KEY, 0, -1):  # type: ignore[union-attr]
        record = json.loads(entry)
        if record["id"] == batch.id:
            assert served.redis.hdel(f"tokenmill:run:{record['run']}", "cancelled")
            served.redis.hset(f"tokenmill:run:{record['run']}", "plan_error", "it was lost")
    assert served.client.batches.retrieve(batch.id).status == "cancelled"
