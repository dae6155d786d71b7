"""What the server tells Prometheus, and what it records for the dashboard."""

import io
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from jobs.api_keys import ProjectLimits, add_key, set_limits
from jobs.runs.watching.api_records import recorded_batches, recorded_limits
from tests.rq_workers import ROOT, wait_until
from tests.tokenmill.server.conftest import Served
from tests.tokenmill.server.server_process import client, running_server

Samples = dict[tuple[str, ...], float]


def exposition(address: str, key: str = "") -> str:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{address}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return str(response.read().decode())


def samples(address: str, key: str = "") -> Samples:
    """By the metric's name and its labels' values."""
    values: Samples = {}
    for family in text_string_to_metric_families(exposition(address, key)):
        for sample in family.samples:
            values[sample.name, *sample.labels.values()] = sample.value
    return values


def test_requests_are_counted_by_their_endpoint_and_status(served: Served) -> None:
    before = samples(served.address)
    served.client.completions.create(model="fake", prompt="x")
    with pytest.raises(openai.NotFoundError):
        served.client.files.retrieve("file-0")
    with pytest.raises(openai.NotFoundError):
        served.client.post("/audio/speech", cast_to=object, body={})
    after = samples(served.address)
    for labels in (("/v1/completions", "200"), ("/v1/files/{id}", "404"), ("other", "404")):
        name = ("tokenmill_api_requests_total", *labels)
        assert after[name] == before.get(name, 0) + 1
    whole = ("tokenmill_api_request_seconds_count", "/v1/completions")
    assert after[whole] == before.get(whole, 0) + 1


def test_the_first_event_of_a_stream_has_its_time(served: Served) -> None:
    first = ("tokenmill_api_time_to_first_token_seconds_count", "/v1/completions")
    before = samples(served.address).get(first, 0)
    stream = served.client.completions.create(model="fake", prompt="x", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream)
    after = samples(served.address)
    assert after[first] == before + 1
    assert after["tokenmill_api_open_streams",] == 0


def test_bytes_of_uploads_are_counted(served: Served) -> None:
    name = ("tokenmill_api_uploaded_bytes_total",)
    before = samples(served.address)[name]
    data = b"x" * 1000
    served.client.files.create(file=("a", io.BytesIO(data)), purpose="user_data")
    assert before + 1000 < samples(served.address)[name] < before + 3000


def test_batches_are_counted_by_their_state(served: Served) -> None:
    file = served.client.files.create(file=("a", io.BytesIO(b"{}\n")), purpose="batch")
    batch = served.client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    (record,) = [each for each in recorded_batches(served.redis) if each.id == batch.id]
    assert record.project == "default"
    assert record.expires_at == batch.expires_at
    wait_until(lambda: served.client.batches.retrieve(batch.id).status == "completed")
    name = ("tokenmill_api_batches", "default", "completed")
    count = samples(served.address)[name]
    assert count >= 1
    assert samples(served.address)[name] == count, "one that has ended is not read again"


def test_refusals_are_counted_and_recorded_by_project(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    key = add_key(redis, "small", "")
    scraper = add_key(redis, "metrics", "prometheus")
    set_limits(redis, "small", ProjectLimits(requests_per_minute=1))
    with running_server(redis_url, tmp_path / "log") as address:
        api = client(address, key)
        for _ in range(3):
            with pytest.raises(openai.APIStatusError):
                api.completions.create(model="fake", prompt="x")
        counted = samples(address, scraper)
        assert counted["tokenmill_api_limited_total", "small", "rate_limit_exceeded"] >= 1
        (limited,) = recorded_limits(redis)
        assert (limited.project, limited.limit) == ("small", "rate_limit_exceeded")

        for wrong, status in (("", 401), ("none", 401), (key, 403)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                exposition(address, wrong)
            with caught.value as error:
                assert error.code == status


def test_board_and_rules_ask_for_metrics_that_are_served(served: Served) -> None:
    served.client.completions.create(model="fake", prompt="x")
    deploy = ROOT / "ops" / "deploy"
    rules = (deploy / "prometheus" / "tokenmill.rules.yml").read_text()
    board = (deploy / "grafana" / "tokenmill.json").read_text()
    asked = {
        re.sub("_(total|bucket)$", "", name)
        for name in re.findall(r"tokenmill_api_\w+", rules + board)
    }
    assert len(asked) > 4
    metrics = set(
        re.findall(r"^# TYPE (\w+?)(?:_total)? ", exposition(served.address), re.MULTILINE)
    )
    assert asked <= metrics


def test_no_redis_no_numbers(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    redis.set("tokenmill:run:api-batches", "no sorted set")
    with running_server(redis_url, tmp_path / "log") as address:
        with pytest.raises(urllib.error.HTTPError) as caught:
            exposition(address)
        with caught.value as error:
            assert error.code == 503


@pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not installed (Debian: prometheus)"
)
def test_promtool_finds_nothing_to_say_against_the_metrics(served: Served) -> None:
    served.client.completions.create(model="fake", prompt="x")
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=exposition(served.address),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
