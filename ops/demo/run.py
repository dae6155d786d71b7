"""The demo: 20 prompts and a Parquet file through Redis and one worker, with real answers at the end.

`bash ops/demo.sh` makes the environment and runs this. MODEL=<folder or hub id> uses another model, whose
answers are shown without being judged.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

from ops.redis_server import server_command, wait_until_ready

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "ops" / "out" / "dates"
MODEL = os.environ.get("MODEL") or str(ROOT / "ops" / "demo" / "model")
IS_DEMO_MODEL = "MODEL" not in os.environ or not os.environ["MODEL"]
DATES = ROOT / "ops" / "demo" / "dates.parquet"
WORKER = "demo"
READY_S = 600  # a large model of the user's own may take minutes to load
ANSWER_S = 60

PROMPTS = [
    "the 3rd of March, '87",
    "Tuesday, 12 November 2019",
    "4/7/1999",
    "4.7.1999",
    "2024-02-29",
    "le 14 juillet 1989",
    "Freitag, den 9. November 1989",
    "1 de mayo de 2004",
    "il 25 aprile 1945",
    "invoice dated Aug 1st, 2012",
    "31/12/99",
    "12 de outubro de 2010",
    "5 mei 1945",
    "DECEMBER 24TH, 2001",
    "due on 7 Feb '05",
    "30 February 2020",
    "call 555-0199 before noon",
    "mercredi 1er avril 1998",
    "March madness tickets, row 12",
    "17. Juni 1953",
]


def environment(redis_url: str) -> dict[str, str]:
    """What every process of the demo sees: no setting of the user's own but the model."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("TOKENMILL_", "RQ_"))
    }
    settings = {
        "TOKENMILL_MODEL": MODEL,
        "TOKENMILL_DATA_ROOTS": str(ROOT / "ops"),
        "TOKENMILL_LOG_FORMAT": "text",  # a person reads it, where something went wrong
    }
    if IS_DEMO_MODEL:
        # A million parameters: handing a layer to a second thread takes longer than computing it.
        settings["TOKENMILL_TORCH_THREADS"] = "1"
    return {**kept, **settings, "RQ_REDIS_URL": redis_url}


@contextmanager
def running(
    command: list[str], log: Path, *, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process beside ours; end it, gently first, when the block ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=cwd, env=env
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_worker(redis: Redis, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the worker has loaded its model. Exits with its log where it ended instead."""
    deadline = time.monotonic() + READY_S
    while not redis.exists(f"tokenmill:worker:{name}"):
        if process.poll() is not None:
            sys.exit(f"the worker ended with status {process.returncode}:\n{log.read_text()}")
        if time.monotonic() > deadline:
            sys.exit(f"the worker was not ready after {READY_S} s; its log is {log}")
        time.sleep(0.05)


def enqueue(number: int, text: str, env: dict[str, str]) -> str:
    """Push one prompt with the `rq enqueue` command line; return the job's id."""
    job_id = f"demo-{number}"
    if IS_DEMO_MODEL:
        messages = json.dumps([{"role": "user", "content": text}])
        call = ["jobs.chat", f"messages:={messages}"]
    else:
        call = ["jobs.complete", f"prompt={text}"]
    command = ["rq", "enqueue", "--quiet", "-S", "json", "-q", "prompts", "--job-id", job_id]
    subprocess.run(
        [*command, *call, "max_tokens:=16", "temperature:=0"], check=True, env=env, cwd=ROOT
    )
    return job_id


def answer(redis: Redis, job_id: str) -> str:
    """Wait for one answer."""
    result = Job.fetch(job_id, connection=redis, serializer=JSONSerializer).latest_result(
        timeout=ANSWER_S
    )
    if result is None:
        sys.exit(f"job {job_id} has no answer after {ANSWER_S} s")
    if result.return_value is None:
        sys.exit(f"job {job_id} failed:\n{result.exc_string}")
    choice = result.return_value["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def ask_prompts(redis: Redis, env: dict[str, str]) -> None:
    """The producer's side: push 20 prompts, print their answers."""
    function = "jobs.chat" if IS_DEMO_MODEL else "jobs.complete"
    print(f"\n20 prompts with `rq enqueue -S json -q prompts {function} ...`:\n")
    with ThreadPoolExecutor(4) as shells:
        job_ids = list(
            shells.map(lambda number: enqueue(number, PROMPTS[number], env), range(len(PROMPTS)))
        )
    for text, job_id in zip(PROMPTS, job_ids, strict=True):
        print(f"  {text:<34} {answer(redis, job_id)!r}")


def submit_file(env: dict[str, str]) -> None:
    """The data team's side: score a Parquet file, with a progress bar."""
    column = ["--messages-column", "messages"] if IS_DEMO_MODEL else ["--prompt-column", "text"]
    shutil.rmtree(OUT, ignore_errors=True)
    print(f"\n{DATES.relative_to(ROOT)} with `tokenmill submit --wait`:\n", flush=True)
    command = ["tokenmill", "submit", str(DATES), str(OUT), "--wait", "--queue", "bulk", *column]
    command += ["--rows-per-shard", "500", "--max-tokens", "16", "--temperature", "0"]
    subprocess.run(command, check=True, env=env, cwd=ROOT)


def report(redis: Redis) -> None:
    """Print what the run was worth: accuracy, speed, prefix cache, and where the rows are."""
    manifest = json.loads((OUT / "_manifest.json").read_text())
    table = pq.read_table(OUT)
    stats = json.loads(redis.get(f"tokenmill:worker:{WORKER}") or b"{}")
    prompt_tokens = pc.sum(table["prompt_tokens"]).as_py()
    cached_tokens = pc.sum(table["cached_tokens"]).as_py()
    completion_tokens = pc.sum(table["completion_tokens"]).as_py()
    seconds = manifest["seconds"]
    print(f"\nrows                {table.num_rows:,} ({manifest['errors']} with an error)")
    if IS_DEMO_MODEL:
        right = pc.sum(pc.equal(table["completion"], table["truth"])).as_py()
        print(f"accuracy            {right / table.num_rows:.2%} of the true answers, exactly")
    print(f"rows/s              {table.num_rows / seconds:,.0f}")
    print(
        f"tokens/s            {completion_tokens / seconds:,.0f} written, {prompt_tokens / seconds:,.0f} read"
    )
    print(
        f"prefix cache        {cached_tokens / max(1, prompt_tokens):.1%} of prompt tokens came from it"
    )
    print(f"most sequences      {stats.get('max_running')} at once in the batch")
    print(f"output              {OUT.relative_to(ROOT)}")


def main() -> None:
    """Start Redis and a worker, use them, stop what was started, also on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
        socket = Path(folder) / "redis.sock"
        url = f"unix://{socket}"
        env = environment(url)
        log = Path(folder) / "worker.log"
        worker = [
            "rq",
            "worker",
            "--worker-class",
            "worker.BatchWorker",
            "-S",
            "json",
            "--name",
            WORKER,
        ]
        with running(server_command(Path(folder), socket), Path(folder) / "redis.log"):
            wait_until_ready(url)
            with (
                running([*worker, "prompts", "bulk"], log, env=env) as process,
                Redis.from_url(url, socket_timeout=None) as redis,
            ):
                print(f"one worker on the queues prompts and bulk, model {MODEL}", flush=True)
                wait_for_worker(redis, WORKER, process, log)
                ask_prompts(redis, env)
                submit_file(env)
                report(redis)


if __name__ == "__main__":
    main()
