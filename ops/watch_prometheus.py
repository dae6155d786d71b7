"""A real Prometheus watches a real worker: what its tools say of metrics and rules, and that alerts fire.

    apt-get install prometheus
    python -m ops.watch_prometheus

promtool checks the exposition of a worker at work, the alert rules with their tests, and the configuration.
Then Prometheus scrapes that worker every second, under the same rules with seconds in the place of minutes. A
run with a row that never ends must let TokenmillRunStuck fire, and not before; every query of the Grafana
board must be answered; and the worker's end must let TokenmillWorkerDown fire. Exit status 1 where one fails.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rq.command import send_shutdown_command

from tests.redis_server import running_redis_server
from tests.rq_workers import Workers, wait_until

DEPLOY = Path(__file__).parent / "deploy"
RULES = DEPLOY / "prometheus" / "tokenmill.rules.yml"
BOARD = DEPLOY / "grafana" / "tokenmill.json"
WAIT_S = 90


def missing_tools() -> str:
    """Which of the programs is not installed; "" where all are."""
    return ", ".join(name for name in ("prometheus", "promtool") if shutil.which(name) is None)


def board_queries() -> list[str]:
    """Every PromQL query of the Grafana board, its variables filled in."""
    board = json.loads(BOARD.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    found += [each["expr"] for each in board["annotations"]["list"]]
    return [query.replace("$__rate_interval", "1m").replace("$instance", ".*") for query in found]


def check_files() -> None:
    """promtool's word on the rules, their tests and the configuration."""
    folder = DEPLOY / "prometheus"
    _promtool("check", "rules", str(RULES))
    _promtool("check", "config", str(folder / "prometheus.yml"))
    _promtool("test", "rules", str(folder / "tokenmill.rules.test.yml"))


def check_metrics(exposition: str) -> None:
    """promtool's word on what a worker serves: it lints names, types and help."""
    _promtool("check", "metrics", text=exposition)


def drill(folder: Path) -> Iterator[str]:
    """Take a worker through a stuck run and its death under a Prometheus; tell each thing that went well."""
    with running_redis_server() as url, _workers(url, folder) as workers:
        port = _free_port()
        process = workers.start(
            "--name", "watched", TOKENMILL_METRICS_PORT=str(port), TOKENMILL_DATA_ROOTS=str(folder)
        )
        worker = f"http://127.0.0.1:{port}"
        for job in [workers.queue("bulk").enqueue("jobs.complete", f"p{i}", max_tokens=5) for i in range(50)]:
            workers.result(job)
        wait_until(lambda: _get(f"{worker}/readyz") == "ok\n")
        check_metrics(_get(f"{worker}/metrics"))
        yield "promtool finds nothing to say against the worker's metrics"
        with _prometheus(folder, port) as prometheus:
            _await(lambda: prometheus.query('rate(tokenmill_steps_total{job="tokenmill"}[5s])'))
            assert "TokenmillRunStuck" not in prometheus.firing()
            pq.write_table(pa.table({"prompt": ["a", "hang", "b"]}), folder / "in.parquet")
            paths = str(folder / "in.parquet"), str(folder / "out")
            workers.queue("bulk").enqueue(
                "jobs.score_parquet", *paths, prompt_column="prompt", sampling={"max_tokens": 3}
            )
            _await(lambda: "TokenmillRunStuck" in prometheus.firing())
            yield "TokenmillRunStuck fires on a run whose row never ends, and did not before"
            refused = [query for query in board_queries() if not prometheus.takes(query)]
            assert not refused, refused
            yield f"Prometheus answers all {len(board_queries())} queries of the board"
            send_shutdown_command(workers.redis, "watched")
            time.sleep(1.5)
            send_shutdown_command(workers.redis, "watched")
            process.wait(timeout=WAIT_S)
            _await(lambda: "TokenmillWorkerDown" in prometheus.firing())
            yield "TokenmillWorkerDown fires once it is gone"


class _Api:
    """The HTTP API of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, text: str) -> list[Any]:
        """What an instant query finds."""
        try:
            found = _get(f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': text})}")
        except urllib.error.URLError:
            return []
        return list(json.loads(found)["data"]["result"])

    def takes(self, text: str) -> bool:
        """Whether a query is one."""
        try:
            _get(f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': text})}")
        except urllib.error.HTTPError:
            return False
        return True

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        alerts = json.loads(_get(f"{self._url}/api/v1/alerts"))["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@contextmanager
def _prometheus(folder: Path, worker_port: int) -> Iterator[_Api]:
    (folder / "rules.yml").write_text(re.sub(r"\b(\d+)[mh]\b", _in_seconds, RULES.read_text()))
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        "rule_files: [rules.yml]\n"
        "scrape_configs:\n"
        "  - job_name: tokenmill\n"
        f"    static_configs: [{{targets: ['127.0.0.1:{worker_port}']}}]\n"
    )
    port = _free_port()
    arguments = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "tsdb",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", *(f"--{name}={value}" for name, value in arguments.items())],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield _Api(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()


def _in_seconds(found: re.Match[str]) -> str:
    """The rules' minutes as seconds; their hours as a minute, which no drill lasts."""
    return "60s" if found[0].endswith("h") else f"{found[1]}s"


@contextmanager
def _workers(url: str, folder: Path) -> Iterator[Workers]:
    workers = Workers(url, folder)
    try:
        yield workers
    finally:
        workers.close()
        workers.redis.close()


def _await(condition: Callable[[], object]) -> None:
    wait_until(condition, timeout_s=WAIT_S)


def _promtool(*args: str, text: str | None = None) -> None:
    done = subprocess.run(["promtool", *args], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"promtool {' '.join(args[:2])}: {done.stdout}{done.stderr}"


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return str(reply.read().decode())


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> int:
    """Check and drill; say what went well."""
    if missing := missing_tools():
        print(f"not installed: {missing} (Debian: apt-get install prometheus)")
        return 1
    check_files()
    print("promtool takes the rules, their tests and the configuration")
    with tempfile.TemporaryDirectory() as folder:
        for line in drill(Path(folder)):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
