"""A producer with RQ 2.12 beside the harness: it enqueues jobs of every kind and reads how they ended."""

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import Redis

from tests.faults.ledger import Findings, Ledger
from tests.rq_suite.sdist import rq_2

ROOT = Path(__file__).parents[2]


class OlderClient:
    """A process with a ledger of its own, in which `rq` is 2.12. Raises CannotFetch where pip gets none."""

    def __init__(self, url: str, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, url, str(folder)],
            env={**os.environ, "PYTHONPATH": f"{rq_2()}{os.pathsep}{ROOT}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def ask_jobs(self, count: int) -> list[str]:
        """Enqueue jobs; return the ids."""
        return list(self._call("ask_jobs", count))

    def audit(self) -> Findings:
        """Compare what was asked here since the last audit with what this client reads of it."""
        return Findings(**self._call("audit"))

    def _call(self, *words: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def main(url: str, folder: str) -> None:
    """Do what the lines of the standard input say."""
    ledger = Ledger(Redis.from_url(url), Path(folder), random.Random(0))
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        reply = asdict(ledger.audit()) if what == "audit" else ledger.ask_jobs(*arguments)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
