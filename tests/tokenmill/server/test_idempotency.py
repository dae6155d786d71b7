"""A retry with the same Idempotency-Key gets what the first request made, and makes nothing itself."""

import asyncio
import io
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import openai
import pytest
from redis import Redis
from starlette.requests import Request

from tests.rq_workers import wait_until
from tests.tokenmill.server.conftest import Served
from tokenmill.server.errors import ApiError
from tokenmill.server.idempotency import IdempotencyKeys, Made


def keyed(key: str | None = None) -> dict[str, str]:
    return {"Idempotency-Key": key or uuid4().hex}


def num_jobs(redis: Redis) -> int:
    return sum(1 for _ in redis.scan_iter("rq:job:req_*"))


def complete(served: Served, prompt: str, headers: dict[str, str]) -> Any:
    return served.client.completions.create(
        model="fake", prompt=prompt, max_tokens=2, extra_headers=headers
    )


def test_a_retry_gets_the_answer_of_the_first_request(served: Served) -> None:
    headers = keyed()
    first = complete(served, "once", headers)
    before = num_jobs(served.redis)
    assert complete(served, "once", headers) == first
    assert num_jobs(served.redis) == before
    assert served.redis.ttl(f"rq:results:{first.id.removeprefix('cmpl-')}") > 3600
    assert complete(served, "once", keyed()).id != first.id


def test_another_body_or_path_under_a_key_is_refused(served: Served) -> None:
    headers = keyed()
    complete(served, "one", headers)
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        complete(served, "another", headers)
    assert caught.value.code == "idempotency_key_reused"
    with pytest.raises(openai.UnprocessableEntityError):
        served.client.files.create(
            file=("in.jsonl", io.BytesIO(b"{}")), purpose="batch", extra_headers=headers
        )


def test_a_retry_after_a_lost_connection_waits_for_the_same_job(
    served: Served, tmp_path: Path
) -> None:
    headers = keyed()
    gate = tmp_path / "gate"
    before = num_jobs(served.redis)
    body = {"model": "fake", "prompt": f"file:{gate}", "max_tokens": 2}
    data = json.dumps(body).encode()
    host, _, port = served.address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n"
        connection.sendall(f"{head}Idempotency-Key: {headers['Idempotency-Key']}\r\n\r\n".encode())
        connection.sendall(data)
        wait_until(lambda: num_jobs(served.redis) == before + 1)
    wait_until(lambda: " 499, " in served.log.read_text())

    with ThreadPoolExecutor(2) as pool:
        retries = [pool.submit(complete, served, f"file:{gate}", headers) for _ in range(2)]
        gate.touch()
        first, second = [retry.result() for retry in retries]
    assert first == second
    assert first.choices[0].text == f"echo:file:{gate}"
    assert num_jobs(served.redis) == before + 1


def test_a_stream_can_be_asked_for_again(served: Served) -> None:
    headers = keyed()
    texts = []
    for _ in range(2):
        chunks = served.client.completions.create(
            model="fake", prompt="s", max_tokens=2, stream=True, extra_headers=headers
        )
        texts.append([(chunk.id, chunk.choices[0].text) for chunk in chunks])
    assert "".join(text for _, text in texts[0]) == "echo:s"
    assert texts[0][0][0] == texts[1][0][0]
    assert "".join(text for _, text in texts[1]) == "echo:s"


def test_a_failure_is_not_kept(served: Served) -> None:
    headers = keyed()
    with pytest.raises(openai.BadRequestError, match="refused"):
        complete(served, "refuse", headers)
    assert complete(served, "fine", headers).choices[0].text == "echo:fine"


def test_a_job_that_a_killed_server_did_not_enqueue_is_enqueued(served: Served) -> None:
    headers = keyed()
    body = {"model": "fake", "prompt": "left", "max_tokens": 2}
    keys = IdempotencyKeys(served.redis)
    made = made_by(keys, "default", headers["Idempotency-Key"], body, f"req_{uuid4().hex}")
    answer = complete(served, "left", headers)
    assert answer.id == f"cmpl-{made.id}"


def test_a_file_and_a_batch_are_made_once(served: Served) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    headers = keyed()

    def upload(text: str) -> Any:
        file = ("in.jsonl", io.BytesIO(text.encode()))
        return served.client.files.create(file=file, purpose="batch", extra_headers=headers)

    file = upload(json.dumps(line))
    num_files = len(served.client.files.list().data)
    assert upload(json.dumps(line)) == file
    assert len(served.client.files.list().data) == num_files
    with pytest.raises(openai.UnprocessableEntityError):
        upload(json.dumps({**line, "custom_id": "b"}))

    batch_headers = keyed()
    batches = [
        served.client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            extra_headers=batch_headers,
        )
        for _ in range(2)
    ]
    assert batches[0].id == batches[1].id
    with pytest.raises(openai.NotFoundError):
        served.client.batches.create(
            input_file_id="file-" + 28 * "0",
            endpoint="/v1/completions",
            completion_window="24h",
            extra_headers=keyed(),
        )


def made_by(keys: IdempotencyKeys, project: str, key: str, body: Any, new_id: str) -> Made:
    headers = [(b"idempotency-key", key.encode())]
    request = Request({"type": "http", "path": "/v1/completions", "headers": headers})
    return asyncio.run(keys.made(request, project, body, new_id))


def test_a_key_is_its_projects(redis: Redis) -> None:
    keys = IdempotencyKeys(redis)
    assert made_by(keys, "a", "key", {"b": 1, "a": 2}, "first").id == "first"
    assert made_by(keys, "a", "key", {"a": 2, "b": 1}, "second").id == "first"
    assert made_by(keys, "b", "key", {"other": 1}, "third").id == "third"
    asyncio.run(keys.forget(Made("first", "tokenmill:api-once:none"), ApiError(500, "")))
    assert made_by(keys, "a", "key", {"a": 2, "b": 1}, "second").id == "first"


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_has_bounds(redis: Redis, key: str) -> None:
    with pytest.raises(ApiError, match="expected 1 to 255"):
        made_by(IdempotencyKeys(redis), "a", key, {}, "id")
