"""Finds the files that a worker really enters for one prompt and for one row: traced, not read from imports.

    python -m ops.size.entered

A worker with the demo model serves its own Redis in this process. Once the model is loaded, each thread notes the file
of every function that it calls. What an idle worker enters is noted first, and taken off.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from tests.redis_server import running_redis_server
from worker import BatchWorker
from worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "ops" / "demo" / "model"
PRODUCT = ("engine", "jobs", "sandbox", "worker")
QUEUE = "traced"

IDLE_S = 5.0
SETTLED_S = 1.0
LONGEST_S = 60.0
PAUSE_S = 0.05


@dataclass
class Notes:
    """The files whose functions were called, by what was asked at that time."""

    asked: str = "nothing"
    files: dict[str, set[str]] = field(default_factory=dict)

    def note(self, frame: FrameType, event: str, value: Any) -> None:
        """Note a call, for sys.settrace. Returning None leaves the call's lines alone."""
        self.files.setdefault(self.asked, set()).add(frame.f_code.co_filename)

    def ours(self, asked: str) -> set[str]:
        """Return our files among those that were entered, relative to the checkout."""
        folders = tuple(f"{ROOT / name}/" for name in PRODUCT)
        return {
            str(Path(file).relative_to(ROOT))
            for file in self.files.get(asked, ())
            if file.startswith(folders)
        }


class TracedWorker(BatchWorker):
    """A worker whose threads take notes once the model is loaded."""

    notes: Notes

    def load_engine(self, settings: WorkerSettings) -> Any:
        """Load the model untraced, because importing torch takes long enough; then begin."""
        engine = super().load_engine(settings)
        threading.settrace(self.notes.note)
        sys.settrace(self.notes.note)
        return engine


def traced() -> Notes:
    """Run a worker in this process until it has answered a prompt and a row; return what it entered."""
    notes = Notes()
    TracedWorker.notes = notes
    with tempfile.TemporaryDirectory() as name, running_redis_server() as url:
        os.environ |= {
            "TOKENMILL_MODEL": str(MODEL),
            "TOKENMILL_DATA_ROOTS": name,
            "TOKENMILL_KV_CACHE_BYTES": str(64 << 20),
        }
        worker = TracedWorker(
            [QUEUE],
            connection=Redis.from_url(url),
            serializer=JSONSerializer,
            prepare_for_work=True,
        )
        threading.Thread(target=ask, args=(url, Path(name), notes)).start()
        worker.work(logging_level="WARNING")
        sys.settrace(None)
    return notes


def ask(url: str, folder: Path, notes: Notes) -> None:
    """Ask for one prompt and one row when nothing else is to do, then stop the worker of this process."""
    try:
        with Redis.from_url(url) as client:
            queue = Queue(QUEUE, connection=client, serializer=JSONSerializer)
            _wait_until(lambda: bool(client.scard(f"rq:workers:{QUEUE}")))
            # What is made when it is first needed is made for these.
            _complete(queue)
            _score(queue, folder, "first")
            time.sleep(SETTLED_S)
            notes.asked = "idle"
            time.sleep(IDLE_S)
            notes.asked = "prompt"
            _complete(queue)
            notes.asked = "nothing"
            time.sleep(SETTLED_S)
            notes.asked = "row"
            _score(queue, folder, "second")
            notes.asked = "nothing"
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _complete(queue: Queue) -> None:
    job = queue.enqueue("jobs.complete", "4 May 2001", max_tokens=4, temperature=0)
    _wait_until(lambda: job.get_status(refresh=True) == "finished")


def _score(queue: Queue, folder: Path, name: str) -> None:
    source = folder / "in.parquet"
    pq.write_table(pa.table({"prompt": [f"4 May 2001, {name}"]}), source)
    output = folder / name
    sampling = {"max_tokens": 4, "temperature": 0}
    queue.enqueue("jobs.score_parquet", str(source), str(output), sampling=sampling)
    _wait_until((output / "_SUCCESS").exists)


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the worker did not do it in {LONGEST_S:.0f} s")
        time.sleep(PAUSE_S)


def main() -> None:
    """Print how many files a prompt and a row enter, and which."""
    notes = traced()
    idle = notes.ours("idle")
    show("one jobs.complete", notes.ours("prompt") - idle)
    show("a run of one row", notes.ours("row") - idle)
    show("an idle worker, which are not counted above", idle)


def show(asked: str, files: set[str]) -> None:
    """Print what was entered: its number, in all and by package, and its names."""
    by_package = Counter(file.partition("/")[0] for file in files)
    shares = ", ".join(f"{count} of {package}" for package, count in sorted(by_package.items()))
    print(f"{len(files):>8,} files are entered for {asked}: {shares}")
    for file in sorted(files):
        print(f"         {file}")


if __name__ == "__main__":
    main()
