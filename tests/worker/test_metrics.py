"""What a worker serves over HTTP of itself: numbers, and whether it lives and is ready."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from engine import Completion, EngineStats
from engine.schedule.sequences.outputs import RequestMetrics
from jobs.watch.samples import Point
from tests.rq_workers import ROOT, Workers, wait_until
from worker.errors import MetricsNotServed
from worker.io_thread.held.held_job import HeldJob
from worker.io_thread.held.held_jobs import JobCounts
from worker.metrics.exporter import Exporter
from worker.metrics.health import LIVE_S, REACHED_S, Health
from worker.metrics.server import MAX_REQUESTS, MetricsServer
from worker.metrics.tally import OTHER, Counts, EndedJob, Histogram
from worker.metrics.watched_worker import Shown, WatchedWorker
from worker.settings import SettingsError, WorkerSettings
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.outcome import Outcome

STATS = EngineStats(
    num_steps=9, num_running=3, max_running=4, num_waiting=2, num_preemptions=1, prefill_tokens=70,
    cached_tokens=30, decode_tokens=20, num_blocks=10, free_blocks=4, generation_tokens=25,
    step_seconds={"schedule": 0.5, "launch": 2.0}, num_scheduled=21, batch_sizes=(2, 3, 4, 0),
)  # fmt: skip
DEPLOY = ROOT / "ops" / "deploy"
RULES, BOARD = DEPLOY / "prometheus" / "tokenmill.rules.yml", DEPLOY / "grafana" / "tokenmill.json"
SHOWN = Shown("busy", Point(max_num_seqs=8), {"bulk": {"queued": 7}}, {("bulk", "engine"): 5})


def exposition(counts: Counts, model: str = "m") -> str:
    facts = {"worker": "w", "model": model, "dtype": "float32", "version": "1"}
    exporter = Exporter()
    exporter.serve(WatchedWorker(facts, ("high", "bulk"), counts, lambda: SHOWN, lambda: vars(STATS)))
    return exporter.exposition("")[0].decode()


def values(text: str) -> dict[str, float]:
    """By name and labels, each label in its place, without those of the process and of the model."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def ended(queue: str = "bulk", outcome: str = "finished", reason: str = "", **more: float) -> EndedJob:
    return EndedJob(queue, outcome, reason, enqueued_at=100.0, began_at=103.0, ended_at=110.0, **more)  # type: ignore[arg-type]


def busy_counts() -> Counts:
    counts = Counts()
    counts.job_ended(lambda: ended(rows=10, row_errors=3, rows_unasked=2))
    counts.job_ended(lambda: ended(outcome="failed", reason="DiskFull"))
    times = RequestMetrics(arrival_time=1.0, first_token_time=1.2, finished_time=4.0)
    counts.completed(Completion("r", 0, [1], "a", "stop", 1, 0, metrics=times))
    counts.completed(Completion("r", 0, [], "", "error", 1, 0))
    counts.lost(2)
    counts.redis_failed(TimeoutError())
    for _ in range(3):
        assert counts.sent is not None
        counts.sent()
    assert counts.sent_by_functions is not None
    counts.sent_by_functions()
    return counts


def test_the_exposition_has_what_the_worker_and_its_engine_have_counted() -> None:
    found = values(exposition(busy_counts()))
    expected = {
        "rq_jobs queue=bulk status=queued": 7,
        "rq_workers name=w queues=high,bulk state=busy": 1,
        "tokenmill_jobs_held kind=engine queue=bulk": 5,
        "tokenmill_jobs_held kind=function queue=bulk": 0,
        "tokenmill_jobs_total outcome=finished queue=bulk reason=": 1,
        "tokenmill_jobs_total outcome=failed queue=bulk reason=DiskFull": 1,
        "tokenmill_rows_total outcome=answered queue=bulk reason=": 7,
        "tokenmill_rows_total outcome=error queue=bulk reason=input": 2,
        "tokenmill_rows_total outcome=error queue=bulk reason=request": 1,
        "tokenmill_claims_lost_total": 2,
        "tokenmill_redis_round_trips_total client=worker": 3,
        "tokenmill_redis_round_trips_total client=functions": 1,
        "tokenmill_redis_errors_total error=TimeoutError": 1,
        "tokenmill_job_queue_time_seconds_sum queue=bulk": 6,
        "tokenmill_job_latency_seconds_sum queue=bulk": 20,
        "tokenmill_num_requests_running": 3,
        "tokenmill_num_requests_waiting": 2,
        "tokenmill_max_num_seqs": 8,
        "tokenmill_kv_cache_usage_perc": 0.6,
        "tokenmill_prompt_tokens_total": 100,
        "tokenmill_generation_tokens_total": 25,
        "tokenmill_prefix_cache_hits_total": 30,
        "tokenmill_num_preemptions_total": 1,
        "tokenmill_steps_total": 9,
        "tokenmill_step_seconds_total part=launch": 2,
        "tokenmill_iteration_requests_bucket le=2.0": 5,
        "tokenmill_iteration_requests_bucket le=+Inf": 9,
        "tokenmill_iteration_requests_sum": 21,
        "tokenmill_request_success_total finished_reason=stop": 1,
        "tokenmill_time_to_first_token_seconds_sum": pytest.approx(0.2),
        "tokenmill_e2e_request_latency_seconds_sum": 3,
        "tokenmill_e2e_request_latency_seconds_count": 1,
    }
    assert {name: found.get(name) for name in expected} == expected


def test_rows_of_a_shard_are_counted_by_whether_they_were_asked() -> None:
    counts = Counts()
    for unasked in (1, None):  # None of a part that another worker has written
        value = {"rows": 5, "errors": 3, "rows_unasked": unasked}
        job = HeldJob(0, ClaimedJob("id", "e", "bulk", "w"), is_file=True, lane=0)
        JobCounts(counts).add(job, Outcome(job.claimed, "finished", value, datetime.now(UTC), 1.0))
    assert counts.rows == {
        ("bulk", "answered", ""): 4,
        ("bulk", "error", "input"): 1,
        ("bulk", "error", "request"): 2,
        ("bulk", "error", ""): 3,
    }


def board_queries() -> list[str]:
    """Every PromQL query of the Grafana board."""
    board = json.loads(BOARD.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return found + [each["expr"] for each in board["annotations"]["list"]]


def test_every_query_of_board_and_rules_names_metrics_that_a_worker_serves() -> None:
    served = {name.split()[0] for name in values(exposition(busy_counts()))} | {"up", "ALERTS"}
    served.add("tokenmill_jobs_due")  # by the dashboard, as tests/ops/test_deploy_kubernetes.py sees
    queries = [*board_queries(), RULES.read_text()]
    asked = {name for query in queries for name in re.findall(r"\b([a-z_]+)(?=[\[{])", query)}
    assert "tokenmill_jobs_total" in asked
    assert "tokenmill_job_queue_time_seconds_bucket" in asked
    assert asked <= served


def test_errors_that_users_code_raises_are_told_apart_up_to_a_bound_and_cannot_break_the_format() -> None:
    counts = Counts()
    for name in ("a\nb", 'quo"te\\', "x" * 500, *(f"E{i}" for i in range(1000))):
        counts.job_ended(lambda name=name: ended(outcome="failed", reason=name))
    text = exposition(counts, model='m"\n' + "y" * 5000)
    reasons = [name for name in values(text) if name.startswith("tokenmill_jobs_total")]
    assert len(reasons) <= 41
    assert f"tokenmill_jobs_total outcome=failed queue=bulk reason={OTHER}" in reasons
    assert max(map(len, text.splitlines())) < 1000


@given(st.lists(st.floats(0, 100), max_size=30), st.sets(st.integers(1, 90), min_size=1))
def test_a_histogram_counts_each_value_in_every_bucket_that_has_room_for_it(
    seen: list[float], bounds: set[int]
) -> None:
    histogram = Histogram(sorted(bounds))
    for value in seen:
        histogram.observe(value)
    buckets = histogram.cumulative()
    assert [number for _, number in buckets] == [
        sum(value <= float(bound) for value in seen) for bound, _ in buckets
    ]
    assert all(a <= b for (_, a), (_, b) in pairwise(buckets))


def test_clocks_of_producers_that_are_ahead_or_no_clocks_do_no_harm() -> None:
    counts = Counts()
    counts.job_ended(lambda: EndedJob("bulk", "finished", "", 200.0, 103.0, 110.0))
    counts.job_ended(lambda: EndedJob("bulk", "finished", "", None, 103.0, 110.0))
    assert values(exposition(counts))["tokenmill_job_latency_seconds_sum queue=bulk"] == 0


class Turns:
    turned_at, redis_at, why_not_claiming = 0.0, None, None


def test_a_worker_lives_while_both_its_threads_turn_and_is_ready_while_it_claims() -> None:
    moment = 1000.0
    health, engine, io = Health(lambda: moment), Turns(), Turns()
    assert (health.why_dead(), bool(health.why_not_ready())) == ("", True), "its model is being loaded"
    engine.turned_at = io.turned_at = moment
    health.serve(engine, io)
    assert "Redis" in health.why_not_ready()
    io.redis_at = moment - REACHED_S
    assert (health.why_dead(), health.why_not_ready()) == ("", "")
    io.redis_at = moment - REACHED_S - 1
    assert (health.why_dead(), "Redis" in health.why_not_ready()) == ("", True), "an outage kills no worker"
    io.redis_at = moment
    io.why_not_claiming = "draining"
    assert health.why_not_ready() == "draining"
    io.turned_at -= LIVE_S + 1
    assert "I/O thread" in health.why_dead()
    engine.turned_at -= LIVE_S + 1
    assert "engine thread" in health.why_dead()


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    served = MetricsServer("127.0.0.1", [free_port()])
    yield served
    served.close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def get(port: int, path: str, timeout: float = 5) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_while_the_model_is_loaded_the_worker_lives_and_is_not_ready(server: MetricsServer) -> None:
    assert get(server.port, "/livez") == (200, "ok\n")
    assert get(server.port, "/readyz") == (503, "the model is not loaded yet\n")
    assert "process_resident_memory_bytes" in get(server.port, "/metrics?name=x")[1]
    assert [get(server.port, path)[0] for path in ("/", "/metrics/", "/../etc/passwd")] == [404] * 3


def test_a_taken_port_is_named_and_of_several_ports_the_next_free_one_is_taken(server: MetricsServer) -> None:
    with pytest.raises(MetricsNotServed, match=rf"port {server.port} .*TOKENMILL_METRICS_PORT"):
        MetricsServer("127.0.0.1", [server.port])
    with pytest.raises(MetricsNotServed, match="TOKENMILL_METRICS_HOST"):
        MetricsServer("no such host", [1])
    other = free_port()
    second = MetricsServer("127.0.0.1", [server.port, other])
    assert second.port == other
    second.close()


def test_clients_that_send_half_a_request_keep_nobody_from_being_answered(server: MetricsServer) -> None:
    hanging = []
    for _ in range(MAX_REQUESTS * 3):
        hanging.append(socket.create_connection(("127.0.0.1", server.port)))
        hanging[-1].sendall(b"GET /livez HTTP/1.1\r\n")
    assert get(server.port, "/livez") == (200, "ok\n")
    hanging[0].settimeout(60)
    with suppress(ConnectionResetError):
        assert hanging[0].recv(1) == b"", "the oldest has made room"
    for client in hanging:
        client.close()


def test_a_request_that_trickles_ends_at_its_deadline(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.metrics.server.REQUEST_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.port)) as client, suppress(ConnectionError):
        client.settimeout(0.05)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            client.sendall(b"x")
            with suppress(TimeoutError):
                assert client.recv(1) == b""
                return
        pytest.fail("the connection is still open after 60 s")


def test_what_is_no_request_is_not_answered(server: MetricsServer) -> None:
    for sent in (b"\r\n\r\n", b"GET /livez\r\n\r\n", b"x" * 100_000, b"GET /livez HTTP/1.1\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as client, suppress(ConnectionResetError):
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1000) == b""
    assert get(server.port, "/livez")[0] == 200


@pytest.mark.parametrize(
    ("text", "ports"), [("0", range(0)), ("9464", range(9464, 9465)), ("9464-9466", range(9464, 9467))]
)
def test_ports_are_one_or_several_or_none(monkeypatch: pytest.MonkeyPatch, text: str, ports: range) -> None:
    monkeypatch.setenv("TOKENMILL_MODEL", "m")
    monkeypatch.setenv("TOKENMILL_METRICS_PORT", text)
    assert WorkerSettings.load().metrics_port == ports


@pytest.mark.parametrize("text", ["", "x", "-1", "70000", "9466-9464", "0-5", "٣", "1-2-3"])
def test_what_is_no_port_is_refused_by_the_variables_name(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TOKENMILL_MODEL", "m")
    monkeypatch.setenv("TOKENMILL_METRICS_PORT", text)
    with pytest.raises(SettingsError, match="TOKENMILL_METRICS_PORT"):
        WorkerSettings.load()


def test_where_no_port_is_set_no_client_library_is_loaded() -> None:
    code = "import sys, worker.assembly, worker.batch_worker; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_worker_serves_what_it_does_and_is_not_ready_as_it_drains(workers: Workers, tmp_path: Path) -> None:
    port, queue = free_port(), workers.queue("bulk")
    jobs = [queue.enqueue("jobs.complete", f"p{i}", max_tokens=2) for i in range(20)]
    fails, held = queue.enqueue("jobs.complete", "refuse"), f"file:{tmp_path}/go"
    holds = queue.enqueue("jobs.complete", held)
    process = workers.start("--name", "w", TOKENMILL_METRICS_PORT=str(port))
    for job in (*jobs, fails):
        workers.result(job)
    name = "tokenmill_jobs_held kind=engine queue=bulk"
    wait_until(lambda: values(get(port, "/metrics")[1]).get(name) == 1)
    found = values(get(port, "/metrics")[1])
    assert found["tokenmill_jobs_total outcome=finished queue=bulk reason="] == 20
    assert found["tokenmill_jobs_total outcome=failed queue=bulk reason=RequestFailed"] == 1
    assert found["tokenmill_job_queue_time_seconds_count queue=bulk"] == 21
    assert found["tokenmill_redis_round_trips_total client=worker"] > 5
    assert get(port, "/readyz") == (200, "ok\n")
    process.terminate()
    wait_until(lambda: get(port, "/readyz")[0] == 503)
    assert "draining" in get(port, "/readyz")[1]
    assert get(port, "/livez")[0] == 200
    (tmp_path / "go").touch()
    workers.result(holds)
    assert process.wait(timeout=60) == 0


def test_a_worker_whose_port_is_taken_does_not_start_and_says_why(workers: Workers) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = workers.start(TOKENMILL_METRICS_PORT=str(taken.getsockname()[1]))
        assert process.wait(timeout=60) == 1
    assert "set TOKENMILL_METRICS_PORT to a free one" in workers.log(process)


def test_the_board_is_json_of_panels_with_places_of_their_own() -> None:
    board = json.loads(BOARD.read_text())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in board["panels"]})
