"""Where the pages' commands run: a folder like a clone with some files to score, a real Redis, a real worker.

The worker serves the demo model, which for the pages' sake also embeds. The model of the hub that pages name
stands for it too: nothing is downloaded.
"""

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from redis import Redis

from ops.demo.run import running, wait_for_worker
from ops.documents.blocks import ROOT
from tests.redis_server import running_redis_server

HUB_ID = "Qwen/Qwen3-0.6B"
"""The model that the pages name."""

API = "127.0.0.1:8080"
"""The API server that pages name."""

_DEMO_MODEL = ROOT / "ops" / "demo" / "model"
_POOLING = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
        {
            "idx": 2,
            "name": "2",
            "path": "2_Normalize",
            "type": "sentence_transformers.models.Normalize",
        },
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": 128, "pooling_mode_lasttoken": True},
    "config_sentence_transformers.json": {"prompts": {"query": "Query: "}},
}


class Stage:
    """The folder, and the environment that commands see."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.api_port = _free_port()
        programs = Path(sys.executable).parent
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TOKENMILL_", "RQ_"))}
        self.environment = {
            **kept,
            "PATH": f"{programs}{os.pathsep}{kept.get('PATH', os.defpath)}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "RQ_REDIS_URL": redis_url,
            "TOKENMILL_TORCH_THREADS": "1",
            "TOKENMILL_KV_CACHE_BYTES": "64MiB",
            "TOKENMILL_LEASE_S": "2",
            "TOKENMILL_DATA_ROOTS": f"{folder}:{ROOT / 'ops'}",
            "HF_HUB_OFFLINE": "1",
        }
        _make_clone(folder)
        _make_model(self.model)
        _make_inputs(folder)

    def local(self, command: str) -> str:
        """The command with the stage's model for one of the hub, and its API server for the Procfile's."""
        return command.replace(HUB_ID, str(self.model)).replace(API, f"127.0.0.1:{self.api_port}")


@contextmanager
def running_stage() -> Iterator[Stage]:
    """A stage with a worker on the queues `prompts` and `bulk`; all is ended and removed behind it."""
    # On a port, as redis-cli's `-u` takes no unix socket.
    with (
        tempfile.TemporaryDirectory(prefix="pages-") as folder,
        running_redis_server(_free_port()) as url,
    ):
        stage = Stage(Path(folder), url)
        command = [
            "rq",
            "worker",
            "--worker-class",
            "worker.BatchWorker",
            "-S",
            "json",
            "--name",
            "pages",
        ]
        command += ["--with-scheduler", "prompts", "bulk"]
        log, env = (
            stage.folder / "worker.log",
            {**stage.environment, "TOKENMILL_MODEL": str(stage.model)},
        )
        with (
            running(command, log, cwd=stage.folder, env=env) as process,
            Redis.from_url(url) as redis,
        ):
            wait_for_worker(redis, "pages", process, log)
            api = ["tokenmill", "serve", "--port", str(stage.api_port), "--folder", "api"]
            with running(api, stage.folder / "api.log", cwd=stage.folder, env=stage.environment):
                yield stage


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _make_clone(folder: Path) -> None:
    """The clone's folders, but for what it ignores; commands may write beside them."""
    for name in (
        "ops",
        "jobs",
        "worker",
        "engine",
        "sandbox",
        "tests",
        "tokenmill",
        "docs",
        "mkdocs.yml",
    ):
        (folder / name).symlink_to(ROOT / name)


def _make_model(folder: Path) -> None:
    shutil.copytree(_DEMO_MODEL, folder)
    for name, content in _POOLING.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))


def _make_inputs(folder: Path) -> None:
    """What the pages score: `reviews.parquet`, `pairs.parquet`, and `requests.jsonl` in OpenAI's batch format."""
    texts = ["The food was cold", "We loved every minute", None, "Never again", "Good, but loud"]
    reviews = {
        "id": range(40),
        "title": [None if number % 4 == 0 else f"Visit {number}" for number in range(40)],
        "text": [texts[number % 5] for number in range(40)],
        "prompt": [f"Date {number}: " for number in range(40)],
        "comments": [[{"text": "I agree"}] * (number % 3) for number in range(40)],
    }
    pq.write_table(
        pa.table({name: list(values) for name, values in reviews.items()}),
        folder / "reviews.parquet",
    )
    pairs = {"query": ["How do I brew tea?"] * 2, "document": ["Boil water.", "A queue is a line."]}
    pq.write_table(pa.table(pairs), folder / "pairs.parquet")
    requests = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": f"{number} March 1987"}],
                "max_tokens": 12,
            },
        }
        for number in range(1, 6)
    ]
    (folder / "requests.jsonl").write_text("".join(json.dumps(each) + "\n" for each in requests))
