"""Finds the files that a worker really enters for one prompt and for one row: noted as it runs, not read from imports.

    python -m ops.size.entered

A worker with the demo model serves its own Redis in this process. Each function of ours, kernels aside, notes its
file when it is called: a line is put at its head as its module is loaded. (sys.settrace would be shorter, but under
CPython 3.11 the worker's threads then get nowhere.) What an idle worker enters is noted first, and taken off.
"""

import ast
import builtins
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "ops" / "demo" / "model"
PRODUCT = ("engine", "jobs", "sandbox", "worker")
#: Folders whose functions Numba and Triton compile: they know no such call.
COMPILED = ("cpu_kernels", "kernels")
QUEUE = "noted"

IDLE_S = 5.0
SETTLED_S = 1.0
LONGEST_S = 60.0
PAUSE_S = 0.05


@dataclass
class Notes:
    """The files whose functions were called, by what was asked at that time."""

    asked: str = "nothing"
    files: dict[str, set[str]] = field(default_factory=dict)

    def note(self, file: str) -> None:
        """Note a call. Every function of ours begins with this."""
        self.files.setdefault(self.asked, set()).add(file)


class NotingLoader(SourceFileLoader):
    """Loads a module whose functions note their file."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the module's source with a note at the head of each function; no cached code has it."""
        path = Path(self.get_filename(fullname))
        tree = ast.parse(path.read_bytes(), str(path))
        note = ast.parse(f"__note__({str(path.relative_to(ROOT))!r})").body[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body.insert(ast.get_docstring(node) is not None, note)
        return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)


class NotingFinder:
    """Finds our modules, and gives them that loader."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module of ours, None for all others."""
        from importlib.util import spec_from_file_location

        names = fullname.split(".")
        if names[0] not in PRODUCT or set(names) & set(COMPILED):
            return None
        folder = ROOT.joinpath(*names)
        for file in (folder / "__init__.py", folder.with_suffix(".py")):
            if file.exists():
                return spec_from_file_location(
                    fullname,
                    file,
                    loader=NotingLoader(fullname, str(file)),
                    submodule_search_locations=[str(folder)] if folder.is_dir() else None,
                )
        return None


def noted() -> dict[str, set[str]]:
    """Run a worker in this process until it has answered a prompt and a row; return what it entered for each.

    Modules of ours must not be imported yet.
    """
    notes = Notes()
    builtins.__note__ = notes.note  # type: ignore[attr-defined]
    sys.meta_path.insert(0, NotingFinder)
    from tests.redis_server import running_redis_server
    from worker import BatchWorker

    with tempfile.TemporaryDirectory() as name, running_redis_server() as url:
        os.environ |= {
            "TOKENMILL_MODEL": str(MODEL),
            "TOKENMILL_DATA_ROOTS": name,
            "TOKENMILL_KV_CACHE_BYTES": str(64 << 20),
        }
        worker = BatchWorker(
            [QUEUE],
            connection=Redis.from_url(url),
            serializer=JSONSerializer,
            prepare_for_work=True,
        )
        threading.Thread(target=ask, args=(url, Path(name), notes)).start()
        worker.work(logging_level="WARNING")
    return notes.files


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
    files = noted()
    idle = files["idle"]
    for asked, name in (("prompt", "one jobs.complete"), ("row", "a run of one row")):
        own = sorted(files[asked] - idle)
        print(
            f"{len(own):>8,} files are entered for {name}; {len(idle & files[asked])} more by an idle worker, too"
        )
        print(*(f"    {file}" for file in own), sep="\n")
    print(f"{len(idle):>8,} files are entered by an idle worker")
    print(*(f"    {file}" for file in sorted(idle)), sep="\n")


if __name__ == "__main__":
    main()
