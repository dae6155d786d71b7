"""A project's clients have no more tokens under way than its limit."""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from redis import Redis

from jobs.api_keys import ProjectLimits, add_key, known_keys, set_limits
from tests.rq_workers import wait_until
from tests.tokenmill.server.conftest import Served
from tests.tokenmill.server.server_process import client
from tests.tokenmill.server.test_keys import run
from tokenmill.server.answers.bodies import call_of
from tokenmill.server.errors import ApiError
from tokenmill.server.projects import Project
from tokenmill.server.queued_tokens import QueuedTokens, tokens_of_batch, tokens_of_call

CHAT = [{"role": "user", "content": "x" * 400}]


def tokens_of(path: str, **body: Any) -> int:
    return tokens_of_call(call_of(path, body))


def test_tokens_of_a_call_are_those_that_it_reads_and_may_generate() -> None:
    assert 100 <= tokens_of("/v1/chat/completions", messages=CHAT, max_tokens=50) - 50 <= 110
    assert tokens_of("/v1/completions", prompt="abcd") in range(257, 262)
    assert tokens_of("/v1/completions", prompt=["a", "b"], n=3, max_completion_tokens=10) >= 60
    assert tokens_of("/v1/completions", prompt=[1, 2, 3], max_tokens=1) in range(4, 8)
    assert tokens_of("/v1/embeddings", input=["x" * 400]) == 100
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000}}
    messages = [{"role": "user", "content": [picture]}]
    assert tokens_of("/v1/chat/completions", messages=messages, max_tokens=1) < 20


def test_what_no_worker_would_take_makes_no_room_for_others() -> None:
    assert tokens_of("/v1/completions", prompt="abcd", max_tokens=-1000) >= 1
    assert tokens_of("/v1/completions", prompt="abcd", n=-5) >= 257
    text = "data:" + "x" * 4000
    assert tokens_of("/v1/completions", prompt=text, max_tokens=1) >= 1000, "this is no picture"


def test_tokens_of_a_batch_are_those_of_its_lines() -> None:
    bodies: list[dict[str, Any]] = [{"max_tokens": 10}, {"max_completion_tokens": 20}, {}]
    data = "".join(json.dumps({"body": body}) + "\n" for body in bodies).encode() + b"\n"
    read = len(data) // 4
    assert tokens_of_batch(io.BytesIO(data), generates=True) == read + 10 + 20 + 256
    assert tokens_of_batch(io.BytesIO(data), generates=False) == read


def test_a_limit_of_tokens_is_set_by_a_command(redis: Redis, redis_url: str) -> None:
    run(redis_url, "limit", "small", "--tokens-queued", "1000")
    assert known_keys(redis).limits_of("small") == ProjectLimits(tokens_queued=1000)


def test_what_is_over_the_limit_is_refused_until_something_ends(redis: Redis) -> None:
    now = 1000.0
    open_batches = {"batch_1"}
    tokens = QueuedTokens(redis, lambda project, name: name in open_batches, clock=lambda: now)

    def admit(name: str, num_tokens: int) -> dict[str, str]:
        project = Project("small", ProjectLimits(tokens_queued=100))
        tokens.admit(project, name, num_tokens, 60)
        return project.headers

    assert admit("a", 40)["x-ratelimit-remaining-tokens"] == "60"
    assert admit("batch_1", 40) == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "20",
    }
    with pytest.raises(ApiError, match="has 80 of 100 under way") as refused:
        admit("b", 30)
    assert refused.value.status == 429
    assert refused.value.headers["retry-after"] == "1"
    with pytest.raises(ApiError, match="more than the 100") as too_large:
        admit("never", 101)
    assert too_large.value.status == 413
    admit("c", 20)
    with pytest.raises(ApiError):
        admit("d", 1)

    tokens.leave("small", "c")
    admit("d", 20)
    open_batches.clear()  # nobody says so: it is found out when its room is needed
    admit("e", 40)
    with pytest.raises(ApiError):
        admit("f", 1)
    now += 61  # the servers of all calls are dead
    assert admit("g", 100)["x-ratelimit-remaining-tokens"] == "0"


def needs_key(served: Served) -> bool:
    """Whether the server has seen that there are keys; it looks once a second."""
    try:
        served.client.models.list()
    except openai.AuthenticationError:
        return True
    return False


def test_calls_and_batches_share_a_limit(served: Served, tmp_path: Path) -> None:
    key = add_key(served.redis, "few", "")
    try:
        set_limits(served.redis, "few", ProjectLimits(tokens_queued=1000))
        wait_until(lambda: needs_key(served))
        api = client(served.address, key)
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
        body = {"prompt": f"file:{tmp_path / 'gate'}", "max_tokens": 700}
        data = json.dumps({**line, "body": body}).encode()
        file = api.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
        options: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
        batch = api.batches.create(input_file_id=file.id, **options)

        with pytest.raises(openai.RateLimitError, match="tokens are asked for") as refused:
            api.completions.create(model="fake", prompt="x", max_tokens=400)
        assert refused.value.response.headers["x-ratelimit-limit-tokens"] == "1000"
        with pytest.raises(openai.RateLimitError):
            api.completions.create(model="fake", prompt="x", max_tokens=400, stream=True)
        with pytest.raises(openai.RateLimitError):
            api.batches.create(input_file_id=file.id, **options)
        for _ in range(3):  # each ends before the next one
            answer = api.completions.with_raw_response.create(
                model="fake", prompt="x", max_tokens=200
            )
        assert 0 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 100

        (tmp_path / "gate").touch()
        wait_until(lambda: api.batches.retrieve(batch.id).status == "completed")
        api.completions.create(model="fake", prompt="x", max_tokens=400)
    finally:
        served.redis.delete("tokenmill:api-keys", "tokenmill:api-limits")


def test_a_retry_that_finds_no_room_is_answered_later_by_the_first_job(
    served: Served, tmp_path: Path
) -> None:
    key = add_key(served.redis, "again", "")
    try:
        set_limits(served.redis, "again", ProjectLimits(tokens_queued=1000))
        wait_until(lambda: needs_key(served))
        api = client(served.address, key)
        gate = tmp_path / "gate"

        def complete(prompt: str, **options: Any) -> Any:
            return api.completions.create(model="fake", prompt=prompt, max_tokens=600, **options)

        keyed = {"extra_headers": {"Idempotency-Key": "retried"}}
        first = complete("x", **keyed)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(complete, f"file:{gate}")
            wait_until(lambda: served.redis.hlen("tokenmill:api-tokens:again"))
            with pytest.raises(openai.RateLimitError):
                complete("x", **keyed)
            gate.touch()
            other.result()
        assert complete("x", **keyed).id == first.id
    finally:
        served.redis.delete("tokenmill:api-keys", "tokenmill:api-limits")


def test_a_job_that_goes_on_without_its_client_counts_until_it_ends(
    served: Served, tmp_path: Path
) -> None:
    key = add_key(served.redis, "gone", "")
    api = client(served.address, key)
    try:
        set_limits(served.redis, "gone", ProjectLimits(tokens_queued=1000))
        wait_until(lambda: needs_key(served))
        gate = tmp_path / "gate"
        for is_streamed in (False, True):
            with pytest.raises(openai.APITimeoutError):
                api.completions.create(
                    model="fake",
                    prompt=f"file:{gate}",
                    max_tokens=300,
                    stream=is_streamed,
                    extra_headers={"Idempotency-Key": f"left-{is_streamed}"},
                    timeout=0.5,
                )
        wait_until(lambda: served.log.read_text().count("499, project gone") == 2)
        with pytest.raises(openai.RateLimitError):
            api.completions.create(model="fake", prompt="x", max_tokens=600)

        gate.touch()
        jobs = [name.decode() for name in served.redis.hkeys("tokenmill:api-tokens:gone")]  # type: ignore[union-attr]
        wait_until(lambda: all(served.redis.exists(f"rq:results:{job}") for job in jobs))
        api.completions.create(model="fake", prompt="x", max_tokens=600)
    finally:
        api.close()
        served.redis.delete("tokenmill:api-keys", "tokenmill:api-limits")
