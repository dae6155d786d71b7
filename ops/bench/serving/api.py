"""What the API server carries: streams, calls, an upload, and calls beside a full batch of rows.

    python -m ops.bench.serving.api streams --servers 2
    python -m ops.bench.serving.api calls --servers 2
    python -m ops.bench.serving.api upload
    python -m ops.bench.serving.api beside-rows

Redis, one worker, the servers and the clients share the machine. The first three have a worker that computes nothing;
the last has the demo's model.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from redis import Redis

from jobs.client import Run, submit
from ops.bench.serving.http_load import Connection, Timings, closed_loop, once_each
from ops.bench.serving.stub_worker import STEP_VARIABLE, text_of
from tests.redis_server import running_redis_server
from tests.rq_workers import Workers, wait_until
from tests.tokenmill.server.server_process import client, start_server

ROOT = Path(__file__).parents[3]
COMPLETIONS = "/v1/completions"
GIB = 1 << 30


class Service:
    """Redis, one worker and some servers. cpu: the processor seconds of each so far, by what it is."""

    def __init__(self, url: str, folder: Path, stack: ExitStack, num_servers: int) -> None:
        self.url = url
        self.folder = folder
        self.redis = Redis.from_url(url)
        self._stack = stack
        self._processes: dict[str, psutil.Process] = {}
        pid = self.redis.info("server")["process_id"]
        self._processes["Redis"] = psutil.Process(pid)
        self.addresses: list[str] = []
        for number in range(num_servers):
            log = folder / f"server-{number}.log"
            process, address = start_server(url, log, "--folder", str(folder / "api"))
            stack.callback(process.wait)
            stack.callback(process.kill)
            self.addresses.append(address)
            self._processes[f"server {number + 1}"] = psutil.Process(process.pid)

    def start_worker(self, worker_class: str, **settings: Any) -> None:
        """Start the worker, and wait until it serves."""
        workers = Workers(self.url, self.folder)
        self._stack.callback(workers.close)
        process = workers.start(
            queues=("prompts", "bulk"),
            worker_class=worker_class,
            TOKENMILL_DATA_ROOTS=str(self.folder),
            TOKENMILL_LEASE_S="60",
            **settings,
        )
        self._processes["worker"] = psutil.Process(process.pid)
        wait_until(lambda: client(self.addresses[0]).models.list().data)

    def cpu(self) -> dict[str, float]:
        """Return how many processor seconds each process has used."""
        used = {}
        for name, process in self._processes.items():
            times = process.cpu_times()
            used[name] = times.user + times.system
        return used

    def peak_mib(self) -> dict[str, int]:
        """Return the largest memory that each server had."""
        peaks = {}
        for name, process in self._processes.items():
            if name.startswith("server"):
                status = Path(f"/proc/{process.pid}/status").read_text()
                peaks[name] = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) // 1024
        return peaks


@contextmanager
def running_service(num_servers: int) -> Iterator[Service]:
    """Start Redis and servers; end all at the end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="api-bench-")))
        url = stack.enter_context(running_redis_server())
        yield Service(url, folder, stack, num_servers)


def start_stub(service: Service, step_s: float, max_num_seqs: int) -> None:
    """Start the worker that computes nothing."""
    service.start_worker(
        "ops.bench.serving.stub_worker.StubWorker",
        TOKENMILL_MAX_NUM_SEQS=str(max_num_seqs),
        TOKENMILL_PREFETCH="256",
        **{STEP_VARIABLE: str(step_s)},
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def times(name: str, values: Sequence[float]) -> str:
    """Return the median and the 99th percentile in milliseconds."""
    if not values:
        return f"{name} none"
    return f"{name} {quantile(values, 0.5) * 1000:,.0f} / {quantile(values, 0.99) * 1000:,.0f} ms"


def used(service: Service, before: dict[str, float], seconds: float) -> str:
    """Return the share of a core that each process has used."""
    after = service.cpu()
    shares = [f"{name} {(after[name] - before[name]) / seconds:.0%}" for name in after]
    own = psutil.Process().cpu_times()
    return ", ".join([*shares, f"client {own.user + own.system:.1f} s in all"])


def cpu_of_call(service: Service, before: dict[str, float], count: int) -> str:
    """Return how many milliseconds of a processor each process has used for a call."""
    after = service.cpu()
    return ", ".join(f"{name} {(after[name] - before[name]) * 1000 / count:.2f}" for name in after)


def check(timings: Timings, num_tokens: int, *, is_stream: bool) -> None:
    """Exit if an answer is not what the worker's engine made."""
    if timings.failures:
        sys.exit(f"{len(timings.failures)} requests failed, such as: {timings.failures[0]}")
    expected = text_of(num_tokens)
    for body in timings.bodies:
        if is_stream:
            lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
            pieces = [json.loads(line)["choices"][0]["text"] for line in lines]
            text = "".join(pieces)
        else:
            text = json.loads(body)["choices"][0]["text"]
        if text != expected:
            sys.exit(f"an answer is {text[:80]!r}, expected {expected[:80]!r}")


def measure_streams(options: argparse.Namespace) -> None:
    """Have all streams open at the same time."""
    with running_service(options.servers) as service:
        start_stub(service, options.step_s, options.streams)
        body = {"prompt": "x", "max_tokens": options.tokens, "stream": True}
        asyncio.run(once_each(service.addresses, COMPLETIONS, [body] * 10))
        before = service.cpu()
        began_at = time.perf_counter()
        timings = asyncio.run(once_each(service.addresses, COMPLETIONS, [body] * options.streams))
        seconds = time.perf_counter() - began_at
        check(timings, options.tokens, is_stream=True)
        print(
            f"{options.streams} streams of {options.tokens} tokens, one every {options.step_s * 1000:.0f} ms, "
            f"{options.servers} servers: {seconds:.1f} s, {len(timings.gaps_s) / seconds:,.0f} events/s"
        )
        print("  median / p99:", times("first event", timings.first_s))
        print("  ", times("between events", timings.gaps_s), times("whole", timings.whole_s))
        print("  cores:", used(service, before, seconds), "| peak MiB:", service.peak_mib())


def measure_calls(options: argparse.Namespace) -> None:
    """Raise the number of clients until more bring no more answers."""
    with running_service(options.servers) as service:
        start_stub(service, 0.0, 1024)
        body = {"prompt": "x", "max_tokens": 1}
        asyncio.run(closed_loop(service.addresses, COMPLETIONS, body, 8, 1.0))
        for num_clients in options.clients:
            before = service.cpu()
            commands = service.redis.info("stats")["total_commands_processed"]
            began_at = time.perf_counter()
            timings = asyncio.run(
                closed_loop(service.addresses, COMPLETIONS, body, num_clients, options.seconds)
            )
            seconds = time.perf_counter() - began_at
            check(timings, 1, is_stream=False)
            count = len(timings.whole_s)
            commands = service.redis.info("stats")["total_commands_processed"] - commands
            print(
                f"{num_clients:4} clients: {count / seconds:7,.0f} calls/s, "
                f"{times('median / p99', timings.whole_s)}, {commands / count:.0f} commands a call, "
                f"CPU ms a call: {cpu_of_call(service, before, count)}",
                flush=True,
            )


def measure_upload(options: argparse.Namespace) -> None:
    """Upload one large file."""
    with running_service(1) as service:

        async def upload() -> bytes:
            connection = await Connection.open(service.addresses[0])
            answer = await connection.upload("/v1/files", options.gib * GIB)
            connection.close()
            return answer

        before = service.peak_mib()
        began_at = time.perf_counter()
        answer = json.loads(asyncio.run(upload()))
        seconds = time.perf_counter() - began_at
        if answer["bytes"] != options.gib * GIB:
            sys.exit(f"the server took {answer}")
        print(
            f"{options.gib} GiB in {seconds:.1f} s, peak MiB {before} before, {service.peak_mib()} after"
        )


def measure_beside_rows(options: argparse.Namespace) -> None:
    """Compare the time to the first token of streams on an idle worker with that beside a full batch of rows."""
    with running_service(1) as service:
        port = _free_port()
        metrics = WorkerMetrics(port)
        service.start_worker(
            "worker.BatchWorker",
            TOKENMILL_METRICS_PORT=str(port),
            TOKENMILL_MODEL=str(ROOT / "ops" / "demo" / "model"),
            TOKENMILL_DEVICE="cpu",
            TOKENMILL_MAX_NUM_SEQS=str(options.sequences),
            TOKENMILL_TORCH_THREADS="1",
        )
        idle = _first_tokens(service, options.calls)
        run = _submit_rows(service, options)
        wait_until(lambda: metrics.num_running >= options.sequences)
        steps_before = metrics.num_steps
        began_at = time.perf_counter()
        full = _first_tokens(service, options.calls)
        seconds = time.perf_counter() - began_at
        if not run.status().is_active:
            sys.exit("the rows ended before the calls: raise --rows")
        step_s = seconds / (metrics.num_steps - steps_before)
        bar = 2 * quantile(idle, 0.99) + step_s
        print("idle:", times("first token, median / p99", idle))
        print(
            f"beside {options.sequences} rows: {times('first token, median / p99', full)}; "
            f"a step takes {step_s * 1000:.1f} ms; bar {bar * 1000:.0f} ms"
        )


def _first_tokens(service: Service, num_calls: int) -> list[float]:
    body = {"prompt": "1 May 2004 ->", "max_tokens": 4, "stream": True, "ignore_eos": True}

    async def ask() -> list[float]:
        timings = Timings()
        connection = await Connection.open(service.addresses[0])
        for _ in range(num_calls + 10):
            await connection.post(COMPLETIONS, body, timings)
        connection.close()
        if timings.failures:
            sys.exit(timings.failures[0])
        return timings.first_s[10:]  # the first ones warm up

    return asyncio.run(ask())


def _submit_rows(service: Service, options: argparse.Namespace) -> Run:
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = service.folder / "rows.parquet"
    prompts = [f"{number} May 2004 ->" for number in range(options.rows)]
    pq.write_table(pa.table({"prompt": prompts}), source)
    return submit(
        str(source),
        str(service.folder / "out"),
        connection=service.redis,
        sampling={"max_tokens": 256, "ignore_eos": True, "temperature": 1.0},
    )


class WorkerMetrics:
    """What the worker tells Prometheus on a port."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"

    def value(self, name: str) -> float:
        """Return the value of a metric that has one."""
        with urllib.request.urlopen(self._url, timeout=10) as response:
            text = response.read().decode()
        (value,) = re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
        return float(value)

    @property
    def num_running(self) -> int:
        """Return how many sequences the batch holds."""
        return int(self.value("tokenmill_num_requests_running"))

    @property
    def num_steps(self) -> int:
        """Return how many steps there were."""
        return int(self.value("tokenmill_steps_total"))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main() -> None:
    """Measure what the first argument names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    kinds = parser.add_subparsers(required=True)
    streams = kinds.add_parser("streams")
    streams.add_argument("--servers", type=int, default=1)
    streams.add_argument("--streams", type=int, default=1000)
    streams.add_argument("--tokens", type=int, default=100)
    streams.add_argument("--step-s", type=float, default=0.05)
    streams.set_defaults(measure=measure_streams)
    calls = kinds.add_parser("calls")
    calls.add_argument("--servers", type=int, default=1)
    calls.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1000])
    calls.add_argument("--seconds", type=float, default=10.0)
    calls.set_defaults(measure=measure_calls)
    upload = kinds.add_parser("upload")
    upload.add_argument("--gib", type=int, default=1)
    upload.set_defaults(measure=measure_upload)
    beside = kinds.add_parser("beside-rows")
    beside.add_argument("--calls", type=int, default=200)
    beside.add_argument("--rows", type=int, default=20_000)
    beside.add_argument("--sequences", type=int, default=64)
    beside.set_defaults(measure=measure_beside_rows)
    options = parser.parse_args()
    os.chdir(ROOT)
    options.measure(options)


if __name__ == "__main__":
    main()
