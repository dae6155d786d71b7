"""Keys tell projects apart, and nobody sees another project's files and batches."""

import asyncio
import io
import urllib.request
from pathlib import Path

import openai
import pytest
from click.testing import CliRunner
from redis import Redis
from starlette.datastructures import Headers

from jobs.api_keys import known_keys, list_keys
from jobs.cli import main
from jobs.common.keys import API_KEYS_KEY
from tests.forking import ForkedWorkers
from tests.redis_server import running_redis_server
from tests.rq_workers import ROOT, wait_until
from tests.tokenmill.server.server_process import client, running_server
from tokenmill.server.errors import ApiError
from tokenmill.server.projects import KNOWN_S, Projects
from tokenmill.server.serve import NotServed, serve


def run(url: str, *args: str) -> str:
    result = CliRunner().invoke(main, ["--url", url, "keys", *args])
    assert result.exit_code == 0, result.output
    return result.output.strip()


def test_redis_holds_the_hash_of_a_key_alone(redis: Redis, redis_url: str) -> None:
    secret = run(redis_url, "add", "search", "--name", "nightly")
    (digest,) = redis.hkeys(API_KEYS_KEY)
    assert secret.encode() not in digest
    assert secret.encode() not in b"".join(redis.hvals(API_KEYS_KEY))

    key = known_keys(redis).find(secret)
    assert key is not None
    assert (key.project, key.name) == ("search", "nightly")
    assert known_keys(redis).find(secret + "x") is None
    assert secret not in run(redis_url, "list")
    assert "search  nightly" in run(redis_url, "list")


def test_a_revoked_key_is_no_key(redis: Redis, redis_url: str) -> None:
    secret = run(redis_url, "add", "search")
    (key,) = list_keys(redis)
    run(redis_url, "revoke", key.id)
    assert known_keys(redis).find(secret) is None
    result = CliRunner().invoke(main, ["--url", redis_url, "keys", "revoke", key.id])
    assert result.exit_code == 1
    assert "no key has the id" in result.output


def test_revoking_the_last_key_does_not_open_a_local_server(redis: Redis, redis_url: str) -> None:
    now = 6_000_000.0
    projects = Projects(redis, is_local=True, clock=lambda: now)
    assert asyncio.run(projects.of(Headers({"host": "127.0.0.1:8080"}))).name == "default"
    run(redis_url, "add", "search")
    (key,) = list_keys(redis)
    run(redis_url, "revoke", key.id)
    assert list_keys(redis) == []
    now += KNOWN_S
    with pytest.raises(ApiError) as caught:
        asyncio.run(projects.of(Headers()))
    assert caught.value.status == 401
    assert run(redis_url, "list") == ""


@pytest.mark.parametrize(
    ("host", "origin", "is_answered"),
    [
        ("127.0.0.1:8080", None, True),
        ("localhost", "http://localhost:3000", True),
        ("[::1]:8080", "http://127.0.0.1:8080", True),
        ("evil.example:8080", None, False),
        ("localhost.evil.example", None, False),
        ("10.0.0.7:8080", None, False),
        ("", None, False),
        ("127.0.0.1:8080", "https://evil.example", False),
        ("127.0.0.1:8080", "null", False),
    ],
)
def test_without_keys_no_page_of_another_site_is_answered(
    redis: Redis, redis_url: str, host: str, origin: str | None, is_answered: bool
) -> None:
    projects = Projects(redis, is_local=True)
    headers = {"host": host} if origin is None else {"host": host, "origin": origin}
    if is_answered:
        asyncio.run(projects.check_metrics(Headers(headers)))
        assert asyncio.run(projects.of(Headers(headers))).name == "default"
    else:
        with pytest.raises(ApiError) as caught:
            asyncio.run(projects.check_metrics(Headers(headers)))
        assert caught.value.status == 403
        with pytest.raises(ApiError, match="keys add"):
            asyncio.run(projects.of(Headers(headers)))

    with_key = Headers({**headers, "authorization": f"Bearer {run(redis_url, 'add', 'search')}"})
    projects = Projects(redis, is_local=True)
    assert asyncio.run(projects.of(with_key)).name == "search", "a key is enough under any name"


def test_a_key_opens_at_once_and_closes_within_a_second(redis: Redis, redis_url: str) -> None:
    run(redis_url, "add", "other")
    now = 6_000_000.0
    projects = Projects(redis, is_local=False, clock=lambda: now)
    with pytest.raises(ApiError):
        asyncio.run(projects.of(Headers({"authorization": "Bearer none"})))

    headers = Headers({"authorization": f"Bearer {run(redis_url, 'add', 'search')}"})
    assert asyncio.run(projects.of(headers)).name == "search"
    (key_id,) = [key.id for key in list_keys(redis) if key.project == "search"]
    run(redis_url, "revoke", key_id)
    now += KNOWN_S
    with pytest.raises(ApiError, match="revoked"):
        asyncio.run(projects.of(headers))


@pytest.mark.parametrize("project", ["", "../x", "a/b", "-a", "a" * 65, "a b"])
def test_a_project_has_the_name_of_a_folder(redis: Redis, redis_url: str, project: str) -> None:
    result = CliRunner().invoke(main, ["--url", redis_url, "keys", "add", "--", project])
    assert result.exit_code == 1
    assert "project is" in result.output
    assert not redis.exists(API_KEYS_KEY)


def test_other_machines_are_not_served_without_keys(redis: Redis, redis_url: str) -> None:
    with pytest.raises(NotServed, match="tokenmill keys add"):
        serve(
            redis_url,
            "0.0.0.0",
            0,
            prompts_queue="prompts",
            runs_queue="bulk",
            timeout=60,
            drain=3,
            folder=None,
        )


def test_a_key_opens_its_own_project_and_no_other(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    first_key = run(redis_url, "add", "first")
    second_key = run(redis_url, "add", "second")
    folder = tmp_path / "api"
    with running_server(redis_url, tmp_path / "log", "--folder", str(folder)) as address:
        first = client(address, first_key)
        second = client(address, second_key)
        file = first.files.create(file=("a", io.BytesIO(b"{}\n")), purpose="batch")
        assert [each.id for each in first.files.list().data] == [file.id]
        assert second.files.list().data == []
        batch = first.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        assert second.batches.list().data == []
        for call in (
            lambda: second.files.retrieve(file.id),
            lambda: second.files.content(file.id),
            lambda: second.files.delete(file.id),
            lambda: second.batches.retrieve(batch.id),
            lambda: second.batches.cancel(batch.id),
            lambda: second.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                call()

        for wrong in ("none", "", first_key[:-1], first_key + "x"):
            with pytest.raises(openai.APIError):
                client(address, wrong or " ").files.list()
        assert first_key not in (tmp_path / "log").read_text()


def test_calls_without_a_worker_say_so_at_once(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_server(redis_url, tmp_path / "log") as address:
        api = client(address)
        assert api.models.list().data == []
        with pytest.raises(openai.InternalServerError, match="no worker is alive") as caught:
            api.completions.create(model="fake", prompt="x")
        assert caught.value.status_code == 503
        with pytest.raises(openai.NotFoundError, match="--folder"):
            api.files.list()


def test_the_user_that_ships_may_do_all_that_the_server_does(
    redis_executable: str, tmp_path: Path
) -> None:
    with running_redis_server(executable=redis_executable) as url:
        with Redis.from_url(url) as admin:
            for line in (ROOT / "ops" / "redis-users.acl").read_text().splitlines():
                _, name, *rules = line.split()
                if name != "default":
                    admin.execute_command("ACL", "SETUSER", name, *rules)
        as_server = url.replace("unix://", "unix://server:change-this-3@")
        as_worker = url.replace("unix://", "unix://worker:change-this-1@")
        workers = ForkedWorkers(as_worker, tmp_path)
        try:
            key = run(as_server, "add", "search")
            run(as_server, "limit", "search", "--tokens-queued", "100000")
            workers.start(queues=("prompts", "bulk"), TOKENMILL_DATA_ROOTS=str(tmp_path))
            folder = tmp_path / "api"
            log = tmp_path / "log"
            with running_server(as_server, log, "--folder", str(folder)) as address:
                api = client(address, key)
                wait_until(lambda: api.models.list().data)
                stream = api.completions.create(model="fake", prompt="x", stream=True)
                assert "".join(chunk.choices[0].text for chunk in stream) == "echo:x"
                with pytest.raises(openai.APITimeoutError):
                    api.with_options(timeout=0.5).completions.create(model="fake", prompt="hang")
                file = api.files.create(file=("a", io.BytesIO(b"{}\n")), purpose="batch")
                batch = api.batches.create(
                    input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                )
                headers = {"Idempotency-Key": "once"}
                for _ in range(2):
                    api.completions.create(model="fake", prompt="x", extra_headers=headers)
                wait_until(lambda: api.batches.retrieve(batch.id).status == "completed")
                headers = {"authorization": f"Bearer {run(as_server, 'add', 'metrics')}"}
                request = urllib.request.Request(f"{address}/metrics", headers=headers)
                with urllib.request.urlopen(request, timeout=30) as response:
                    assert b'status="completed"' in response.read()
                assert "NOPERM" not in log.read_text()
        finally:
            workers.close()


def test_limits_are_shown_and_lifted_only_if_told(redis: Redis, redis_url: str) -> None:
    assert run(redis_url, "limit", "small") == "small: no limits"
    run(redis_url, "limit", "small", "--open-batches", "1", "--tokens-queued", "300")
    assert run(redis_url, "limit", "small") == "small: open_batches 1, tokens_queued 300"
    assert run(redis_url, "limit", "small", "--none") == "small: no limits"
    assert run(redis_url, "limit", "small") == "small: no limits"


def test_a_project_has_its_limits(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    key = run(redis_url, "add", "small")
    other = run(redis_url, "add", "free")
    limits = ("--open-batches", "1", "--stored-bytes", "100")
    run(redis_url, "limit", "small", *limits)
    folder = tmp_path / "api"
    with running_server(redis_url, tmp_path / "log", "--folder", str(folder)) as address:
        api = client(address, key)
        with pytest.raises(openai.APIStatusError, match="more than 100 bytes") as too_large:
            api.files.create(file=("a", io.BytesIO(b"x" * 101)), purpose="batch")
        assert too_large.value.status_code == 413
        file = api.files.create(file=("a", io.BytesIO(b"x" * 100)), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="100 of 100 bytes"):
            api.files.create(file=("a", io.BytesIO(b"x")), purpose="batch")

        options = {"endpoint": "/v1/completions", "completion_window": "24h"}
        api.batches.create(input_file_id=file.id, **options)  # type: ignore[arg-type]
        with pytest.raises(openai.RateLimitError, match="1 open batches"):
            api.batches.create(input_file_id=file.id, **options)  # type: ignore[arg-type]
        client(address, other).files.list()


def test_requests_beyond_the_limit_of_a_minute_are_told_when_to_come_again(
    redis: Redis, redis_url: str
) -> None:
    key = run(redis_url, "add", "small")
    run(redis_url, "limit", "small", "--requests-per-minute", "2")
    now = 6_000_010.0
    projects = Projects(redis, is_local=False, clock=lambda: now)
    headers = Headers({"authorization": f"Bearer {key}"})

    answers = [asyncio.run(projects.of(headers)) for _ in range(2)]
    assert [each.headers["x-ratelimit-remaining-requests"] for each in answers] == ["1", "0"]
    assert answers[0].headers["x-ratelimit-reset-requests"] == "50s"
    with pytest.raises(ApiError) as limited:
        asyncio.run(projects.of(headers))
    assert limited.value.status == 429
    assert limited.value.headers["retry-after"] == "50"

    now += 60
    assert asyncio.run(projects.of(headers)).name == "small"
