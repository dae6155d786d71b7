"""A worker whose engine computes nothing but keeps the real one's slots, lanes and steps.

`rq worker --worker-class ops.load.stub_engine.StubWorker` runs it. Its environment:
STUB_STEP_S       seconds a step sleeps
STUB_SEQUENCE_S   and for each sequence in it
STUB_BUSY_S       seconds a step holds Python's lock: no other thread of the worker runs meanwhile
STUB_HOLD         the prompt `hold` is answered once this file exists
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import (
    Completion,
    InvalidRequest,
    ModelIdentity,
    RequestParams,
    RequestProgress,
    SamplingParams,
)
from worker import BatchWorker
from worker.settings import WorkerSettings

#: As the engine's scheduler: a waiting lane gets one admission in twenty.
MAX_OVERTAKES = 19
REFUSED = "refuse"
HELD = "hold"


@dataclass
class StubSequence:
    """One request. left: steps until its answer."""

    request_id: str
    prompt: str
    samples: int
    tokens: int
    lane: int
    left: int


@dataclass
class StubStats:
    """answered: sequences answered since the start. peak_rss_bytes: most memory the process ever held.
    num_blocks: it has no KV pool."""

    num_steps: int
    num_running: int
    max_running: int
    num_waiting: int
    answered: int
    peak_rss_bytes: int
    num_blocks: int = 0


class StubEngine:
    """Answers a prompt with `echo:<prompt>` after max_tokens steps, `slots` requests at a time."""

    identity = ModelIdentity("stub", "none")
    attention_backend = "none"

    def __init__(
        self,
        slots: int,
        step_s: float = 0.0,
        busy_s: float = 0.0,
        hold: Path | None = None,
        sequence_s: float = 0.0,
    ) -> None:
        self._slots, self._step_s, self._busy_s, self._hold = slots, step_s, busy_s, hold
        self._sequence_s = sequence_s
        self._waiting: dict[int, deque[StubSequence]] = {}
        self._running: list[StubSequence] = []
        self.started: list[str] = []
        self._overtaken = self._num_steps = self._max_running = self._answered = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running) or any(self._waiting.values())

    def add(
        self, request_id: str, prompt: str | list[int], params: RequestParams, *, lane: int = 0, **_: Any
    ) -> None:
        assert isinstance(params, SamplingParams)
        if prompt == REFUSED or not prompt:
            raise InvalidRequest("the prompt is empty or refused")
        sequence = StubSequence(request_id, str(prompt), params.n, params.max_tokens, lane, params.max_tokens)
        self._waiting.setdefault(lane, deque()).append(sequence)

    def abort(self, request_id: str) -> None:
        self._running = [each for each in self._running if each.request_id != request_id]
        for lane, waiting in self._waiting.items():
            self._waiting[lane] = deque(each for each in waiting if each.request_id != request_id)

    def step(self) -> list[Completion]:
        self._spend_time()
        self._num_steps += 1
        self.started = []
        self._admit()
        self._max_running = max(self._max_running, len(self._running))
        is_held = self._hold is not None and not self._hold.exists()
        left, done = [], []
        for sequence in self._running:
            sequence.left -= 1
            if sequence.left > 0 or (is_held and sequence.prompt == HELD):
                left.append(sequence)
            else:
                done += [_answer(sequence, index) for index in range(sequence.samples)]
        self._running = left
        self._answered += len(done)
        return done

    def progress(self) -> dict[str, RequestProgress]:
        """How far those are that have a slot."""
        return {
            each.request_id: RequestProgress(1, 0, each.samples * (each.tokens - each.left))
            for each in self._running
        }

    def stats(self) -> StubStats:
        running = len(self._running)
        waiting = self._num_unfinished() - running
        return StubStats(
            self._num_steps, running, self._max_running, waiting, self._answered, peak_rss_bytes()
        )

    def chat_token_ids(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        return list(str(messages[-1]["content"]).encode())

    def prepare_grammar(self, params: SamplingParams) -> None:
        """There is none to compile."""

    def prepare(self, prompt: str | list[int], **options: Any) -> str | list[int]:
        return prompt

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()

    def _spend_time(self) -> None:
        step_s = self._step_s + self._sequence_s * min(self._slots, self._num_unfinished())
        if step_s:
            time.sleep(step_s)
        if self._busy_s:
            until = time.monotonic() + self._busy_s
            while time.monotonic() < until:
                sum(range(1_000_000))  # one call into C: Python's lock is not given away inside it

    def _num_unfinished(self) -> int:
        return len(self._running) + sum(map(len, self._waiting.values()))

    def _admit(self) -> None:
        """Fill the slots, urgent lanes first; those take slots from less urgent lanes, the latest first."""
        lanes = sorted(lane for lane, waiting in self._waiting.items() if waiting)
        for lane in lanes:
            waiting = self._waiting[lane]
            while waiting and (len(self._running) < self._slots or self._preempt(lane)):
                lower = next((self._waiting[other] for other in lanes if other > lane), None)
                if lower and self._overtaken >= MAX_OVERTAKES:
                    self._overtaken = 0
                    self._run(lower)
                    self._running[-1].lane = lane  # moved up: nobody of this lane takes its slot
                    continue
                self._overtaken += bool(lower)
                self._run(waiting)

    def _run(self, waiting: deque[StubSequence]) -> None:
        self._running.append(waiting.popleft())
        self.started.append(self._running[-1].request_id)

    def _preempt(self, lane: int) -> bool:
        victim = next((each for each in reversed(self._running) if each.lane > lane), None)
        if victim is None:
            return False
        self._running.remove(victim)
        self._waiting[victim.lane].appendleft(victim)
        return True


class StubWorker(BatchWorker):
    """BatchWorker in all but the model."""

    def load_engine(self, settings: WorkerSettings) -> StubEngine:
        names = ("STUB_STEP_S", "STUB_BUSY_S", "STUB_SEQUENCE_S")
        step_s, busy_s, sequence_s = (float(os.environ.get(name, "0")) for name in names)
        hold = os.environ.get("STUB_HOLD")
        return StubEngine(settings.max_num_seqs, step_s, busy_s, Path(hold) if hold else None, sequence_s)


def peak_rss_bytes(process: int | str = "self") -> int:
    """Most memory a process has held; of Linux's /proc, because getrusage counts the parent's too. 0 of one
    that has ended."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _answer(sequence: StubSequence, index: int) -> Completion:
    return Completion(
        request_id=sequence.request_id,
        index=index,
        token_ids=[1] * sequence.tokens,
        text=f"echo:{sequence.prompt}",
        finish_reason="length",
        num_prompt_tokens=len(sequence.prompt),
        num_cached_tokens=0,
    )
