"""Runs the blocks of one page, one after the other: `sh` each in a shell, `python` all in one process."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import IO

from redis import Redis

from jobs.common.keys import held_key
from jobs.queues import count_queues
from ops.documents.blocks import Block
from ops.documents.stage import Stage
from tokenmill.dashboard.seen.jobs_seen import FailedJob, newest_failed

BLOCK_S = 180.0
"""How long a block may take before it counts as hung."""

FAILS = "wrong"
"""Jobs whose ids begin so are to fail; any other that does is a failure of its page."""

_QUEUES = ("prompts", "bulk")
_OPEN = ("waiting", "executing", "scheduled", "deferred")
_SHELL = ["bash", "-euo", "pipefail", "-c"]
_INTERPRETER = """
import contextlib, io, json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    printed, status = io.StringIO(), 0
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(json.loads(line), "<page>", "exec"), names)
        except BaseException:
            traceback.print_exc(file=printed)
            status = 1
    print(json.dumps([status, printed.getvalue()]), file=sys.__stdout__, flush=True)
"""


class BlockFailed(Exception):
    """A block of a page did not do what the page says of it."""


class PageRunner:
    """The shell and the Python in which a page's blocks run."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._python: subprocess.Popen[str] | None = None

    def run(self, block: Block) -> None:
        """Run a block that has no reason not to. Raises BlockFailed, with what was printed."""
        for command in block.first:
            self._end(command, f"{block.place}, first: {command}", 0)
        if block.until is not None:
            self._start_and_stop(block, block.until)
            return
        if block.language == "python":
            printed = self._interpret(block)
        else:
            printed = self._end(block.body, block.place, block.status)
        if block.status:
            self._take_failed()  # what it has left is as the page says
        if block.prints is not None and not _matches(block.prints, printed):
            raise BlockFailed(f"{block.place} printed\n{printed}\nThe page says\n{block.prints}")

    def check_jobs(self) -> None:
        """Wait for what the page has enqueued. Raises BlockFailed for jobs that failed, or do not end."""
        deadline = time.monotonic() + BLOCK_S
        with Redis.from_url(self._stage.environment["RQ_REDIS_URL"]) as redis:
            while _has_open(redis):
                if time.monotonic() > deadline:
                    raise BlockFailed(f"jobs of the page have not ended after {BLOCK_S:.0f} s")
                time.sleep(0.05)
        unexpected = [each for each in self._take_failed() if not each.job_id.startswith(FAILS)]
        if unexpected:
            raise BlockFailed(f"jobs of the page failed: {unexpected}")

    def _take_failed(self) -> list[FailedJob]:
        """Jobs that have failed since the last call."""
        with Redis.from_url(self._stage.environment["RQ_REDIS_URL"]) as redis:
            failed = newest_failed(redis, _QUEUES, 100)
            redis.delete(*(f"rq:failed:{queue}" for queue in _QUEUES))
        return failed

    def close(self) -> None:
        """End the page's Python."""
        if self._python is not None:
            self._python.kill()
            self._python.communicate()

    def _end(self, command: str, place: str, status: int) -> str:
        """Run a command to its end; return what it printed on stdout."""
        with self._popen(command, stderr=subprocess.PIPE) as process:
            try:
                printed, told = process.communicate(timeout=BLOCK_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise BlockFailed(f"{place} did not end within {BLOCK_S:.0f} s") from None
        if process.returncode != status:
            raise BlockFailed(
                f"{place} exited with {process.returncode}, not {status}:\n{command}\n{printed}{told}"
            )
        return printed

    def _start_and_stop(self, block: Block, text: str) -> None:
        """Start what does not end by itself, wait for its sign, stop it."""
        process = self._popen(block.body, stderr=subprocess.STDOUT)
        clock = threading.Timer(BLOCK_S, os.killpg, (process.pid, signal.SIGKILL))
        clock.start()
        try:
            assert process.stdout is not None
            printed = _read_until(process.stdout, text)
            os.killpg(process.pid, signal.SIGTERM)
            printed += process.stdout.read()
            process.wait()
            if text not in printed:
                raise BlockFailed(f"{block.place} never said {text!r}:\n{printed}")
        finally:
            clock.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def _interpret(self, block: Block) -> str:
        if self._python is None:
            self._python = subprocess.Popen(
                [sys.executable, "-c", _INTERPRETER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._stage.environment,
                cwd=self._stage.folder,
            )
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        clock = threading.Timer(BLOCK_S, self._python.kill)
        clock.start()
        self._python.stdin.write(json.dumps(self._stage.local(block.body)) + "\n")
        self._python.stdin.flush()
        answer = self._python.stdout.readline()
        clock.cancel()
        status, printed = (
            json.loads(answer) if answer else (1, f"it ended, or hung for {BLOCK_S:.0f} s")
        )
        if status != block.status:
            raise BlockFailed(f"{block.place} failed:\n{block.body}\n{printed}")
        return str(printed)

    def _popen(self, command: str, stderr: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*_SHELL, self._stage.local(command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=self._stage.environment,
            cwd=self._stage.folder,
            start_new_session=True,  # so that what it has started can be stopped with it
        )


def _read_until(stream: IO[str], text: str) -> str:
    """The stream's lines up to the one that has the text, or to its end."""
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            break
    return "".join(lines)


def _matches(said: str, printed: str) -> bool:
    """Whether this is what the page says, blanks counted once; `…` there is anything, or nothing."""
    pattern = re.sub(r"(?:\\ )?…(?:\\ )?", ".*?", re.escape(" ".join(said.split())))
    return re.fullmatch(pattern, " ".join(printed.split())) is not None


def _has_open(redis: Redis) -> bool:
    """Whether a job of the page has not ended; one that waits inside the worker is in none of RQ's counts."""
    counted = count_queues(redis, _QUEUES)
    return any(each.counts[state] for each in counted for state in _OPEN) or any(
        redis.hlen(held_key(queue)) for queue in _QUEUES
    )
