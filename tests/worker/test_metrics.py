"""What a worker serves over HTTP of itself: numbers, and whether it lives and is ready."""

import gc
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import Completion, EngineStats
from engine.schedule.outputs import RequestMetrics
from jobs.common.redis_info import RedisHealth
from jobs.common.workers import Point
from jobs.queues.numbers import QueueNumbers
from tests.rq_workers import ROOT, Workers, wait_until
from worker.errors import MetricsNotServed
from worker.metrics.exporter import Exporter
from worker.metrics.health import LIVE_S, REACHED_S, Health
from worker.metrics.server import MAX_REQUESTS, MetricsServer
from worker.metrics.tally import EndedJob, Statistics, Tally

STATS = EngineStats(
    num_steps=9, num_running=3, max_running=4, num_waiting=2, num_preemptions=1, prefill_tokens=70,
    cached_tokens=30, decode_tokens=20, num_blocks=10, free_blocks=4, generation_tokens=25,
    step_seconds={"schedule": 0.5, "launch": 2.0}, num_scheduled=21, batch_sizes=(2, 3, 4, 0),
)  # fmt: skip
DEPLOY = ROOT / "ops" / "deploy"
RULES, BOARD = DEPLOY / "prometheus" / "tokenmill.rules.yml", DEPLOY / "grafana" / "tokenmill.json"
POINT = Point(max_num_seqs=8, prompt_tokens=100, cached_tokens=30, kv_cache_usage=0.6)
STATISTICS = Statistics(
    "busy", POINT, {"bulk": {"queued": 7}}, {("bulk", "engine"): 5}, vars(STATS)
)


def exposition(counts: Tally, model: str = "m") -> str:
    facts = {"worker": "w", "model": model, "dtype": "float32", "version": "1"}
    exporter, counts.statistics = Exporter(), STATISTICS
    exporter.serve(facts, ("high", "bulk"), counts)
    return exporter.exposition("")[0].decode()


def values(text: str) -> dict[str, float]:
    """By name and labels, each label in its place, without those of the process and of the model."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def ended(
    queue: str = "bulk", outcome: str = "finished", reason: str = "", **more: float
) -> EndedJob:
    times = {"enqueued_at": 100.0, "began_at": 103.0, "ended_at": 110.0}
    return EndedJob(queue, "one", "jobs.chat", False, outcome, reason, **times, **more)  # type: ignore[arg-type]


def busy_counts() -> Tally:
    counts = Tally()
    counts.count_job(ended(rows=10, row_errors=3, rows_unasked=2))
    counts.count_job(ended(outcome="failed", reason="DiskFull"))
    times = RequestMetrics(arrival_time=1.0, first_token_time=1.2, finished_time=4.0)
    counts.count_sample(Completion("r", 0, [1], "a", "stop", 1, 0, metrics=times))
    counts.count_sample(Completion("r", 0, [], "", "error", 1, 0))
    counts.count_lost_claim()
    counts.count_lost_claim()
    counts.count_redis_error(TimeoutError())
    for _ in range(3):
        counts.count_sent("worker")
    counts.count_sent("functions")
    counts.queue_numbers = QueueNumbers(
        {}, {"bulk": 1}, {"bulk": 9.5}, {"bulk": 0}, RedisHealth(5, 10, ("aof_last_write_status",))
    )
    return counts


def test_the_exposition_has_what_the_worker_and_its_engine_have_counted() -> None:
    found = values(exposition(busy_counts()))
    expected = {
        "rq_jobs queue=bulk status=queued": 7,
        "rq_workers name=w queues=high,bulk state=busy": 1,
        "tokenmill_jobs_held kind=engine queue=bulk": 5,
        "tokenmill_jobs_total outcome=finished queue=bulk reason=": 1,
        "tokenmill_jobs_total outcome=failed queue=bulk reason=DiskFull": 1,
        "tokenmill_rows_total outcome=answered queue=bulk reason=": 7,
        "tokenmill_rows_total outcome=error queue=bulk reason=input": 2,
        "tokenmill_claims_lost_total": 2,
        "tokenmill_redis_round_trips_total client=worker": 3,
        "tokenmill_job_queue_time_seconds_sum queue=bulk": 6,
        "tokenmill_max_num_seqs": 8,
        "tokenmill_kv_cache_usage_perc": 0.6,
        "tokenmill_prompt_tokens_total": 100,
        "tokenmill_prefix_cache_hits_total": 30,
        "tokenmill_step_seconds_total part=launch": 2,
        "tokenmill_iteration_requests_bucket le=+Inf": 9,
        "tokenmill_request_success_total finished_reason=stop": 1,
        "tokenmill_time_to_first_token_seconds_sum": pytest.approx(0.2),
        "tokenmill_e2e_request_latency_seconds_sum": 3,
        "tokenmill_jobs_taken_over_total deaths=1 queue=bulk": 0,
        "tokenmill_oldest_job_seconds queue=bulk": 9.5,
        "tokenmill_redis_memory_limit_bytes": 10,
        "tokenmill_redis_write_failed what=aof_last_write_status": 1,
        "tokenmill_redis_write_failed what=rdb_last_bgsave_status": 0,
    }
    assert {name: found.get(name) for name in expected} == expected


def board_queries() -> list[str]:
    """Every PromQL query of the Grafana board."""
    board = json.loads(BOARD.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return found + [each["expr"] for each in board["annotations"]["list"]]


def test_every_query_of_board_and_rules_names_metrics_that_a_worker_serves() -> None:
    served = {name.split()[0] for name in values(exposition(busy_counts()))} | {"up", "ALERTS"}
    queries = [*board_queries(), RULES.read_text()]
    asked = {name for query in queries for name in re.findall(r"\b([a-z_]+)(?=[\[{])", query)}
    # The tests of the API server's metrics see its own.
    asked = {name for name in asked if not name.startswith("tokenmill_api_")}
    assert "tokenmill_jobs_total" in asked
    assert "tokenmill_job_queue_time_seconds_bucket" in asked
    assert asked <= served


class Turns:
    last_turn_at, redis_ok_at, why_not_claiming = 0.0, None, None
    warning = ""


def test_a_worker_lives_while_both_its_threads_turn_and_is_ready_while_it_claims() -> None:
    moment = 1000.0
    health, engine, io = Health(lambda: moment), Turns(), Turns()
    assert (health.why_dead(), bool(health.why_not_ready())) == ("", True), (
        "its model is being loaded"
    )
    engine.last_turn_at = io.last_turn_at = moment
    health.watch(engine, io)
    assert "Redis" in health.why_not_ready()
    io.redis_ok_at = moment - REACHED_S
    assert (health.why_dead(), health.why_not_ready()) == ("", "")
    io.redis_ok_at = moment - REACHED_S - 1
    assert (health.why_dead(), "Redis" in health.why_not_ready()) == ("", True), (
        "an outage kills no worker"
    )
    io.redis_ok_at = moment
    io.why_not_claiming = "draining"
    assert health.why_not_ready() == "draining"
    io.last_turn_at -= LIVE_S + 1
    assert "I/O thread" in health.why_dead()
    engine.last_turn_at -= LIVE_S + 1
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


def test_a_taken_port_is_named_and_of_several_ports_the_next_free_one_is_taken(
    server: MetricsServer,
) -> None:
    with pytest.raises(MetricsNotServed, match=rf"port {server.port} .*TOKENMILL_METRICS_PORT"):
        MetricsServer("127.0.0.1", [server.port])
    with pytest.raises(MetricsNotServed, match="TOKENMILL_METRICS_HOST"):
        MetricsServer("no such host", [1])
    other = free_port()
    second = MetricsServer("127.0.0.1", [server.port, other])
    assert second.port == other
    second.close()


def test_a_worker_serves_what_it_does_and_is_not_ready_as_it_drains(
    workers: Workers, tmp_path: Path
) -> None:
    port, queue = free_port(), workers.queue("bulk")
    jobs = [queue.enqueue("jobs.complete", f"p{i}", max_tokens=2) for i in range(20)]
    fails, held = queue.enqueue("jobs.complete", "refuse"), f"file:{tmp_path}/go"
    holds = queue.enqueue("jobs.complete", held)
    late = queue.enqueue_in(timedelta(hours=1), "jobs.complete", "later")
    process = workers.start("--name", "w", "--with-scheduler", TOKENMILL_METRICS_PORT=str(port))
    for job in (*jobs, fails):
        workers.result(job)
    name = "tokenmill_jobs_held kind=engine queue=bulk"
    wait_until(lambda: values(get(port, "/metrics")[1]).get(name) == 1)
    wait_until(lambda: "tokenmill_jobs_due" in get(port, "/metrics")[1])
    found = values(get(port, "/metrics")[1])
    assert found["tokenmill_jobs_total outcome=finished queue=bulk reason="] == 20
    assert found["tokenmill_jobs_total outcome=failed queue=bulk reason=RequestFailed"] == 1
    assert found["tokenmill_job_queue_time_seconds_count queue=bulk"] == 21
    assert found["tokenmill_redis_round_trips_total client=worker"] > 5
    assert found["tokenmill_jobs_due queue=bulk"] == 0, "this is what KEDA asks for"
    assert found["rq_jobs queue=bulk status=scheduled"] == 1
    assert found["tokenmill_redis_memory_bytes"] > 0
    late.delete()
    assert get(port, "/readyz") == (200, "ok\n")
    process.terminate()
    wait_until(lambda: get(port, "/readyz")[0] == 503)
    assert "draining" in get(port, "/readyz")[1]
    assert get(port, "/livez")[0] == 200
    (tmp_path / "go").touch()
    workers.result(holds)
    assert process.wait(timeout=60) == 0


def test_a_flood_of_half_requests_keeps_nobody_from_being_answered(server: MetricsServer) -> None:
    stop = threading.Event()
    hanging = deque[socket.socket]()

    def flood() -> None:
        while not stop.is_set():
            if len(hanging) == 2 * MAX_REQUESTS:
                hanging.popleft().close()
            hanging.append(socket.create_connection(("127.0.0.1", server.port)))
            hanging[-1].sendall(b"GET /livez HTTP/1.1\r\n")

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for _ in range(30):
            assert get(server.port, "/livez", timeout=30) == (200, "ok\n")
    finally:
        stop.set()
        thread.join()
        for client in hanging:
            client.close()


def test_a_request_that_trickles_ends_at_its_deadline(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.metrics.server.REQUEST_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.port)) as client, suppress(ConnectionError):
        client.settimeout(60)
        client.sendall(b"GET /livez")
        assert client.recv(1) == b""


def test_a_connection_made_as_the_server_closes_leaves_no_socket_open() -> None:
    """Accepted, and its task not begun: nobody but the loop knows of it. A socket left open is a warning, an error."""
    for _ in range(20):
        server = MetricsServer("127.0.0.1", [0])
        callers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        server.close()
        for caller in callers:
            caller.close()
    gc.collect()
