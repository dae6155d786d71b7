"""A worker whose engine computes nothing: each step gives each sequence one more letter."""

import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from engine import Completion, EngineStats, ModelIdentity, PartialText, RequestProgress
from engine import SamplingParams as Params
from worker import BatchWorker
from worker.settings import WorkerSettings

#: Seconds of a step.
STEP_VARIABLE = "STUB_STEP_S"
TEXT = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class _Sequence:
    request_id: str
    max_tokens: int
    num_tokens: int = 0


class StubEngine:
    """Answers as many letters as max_tokens says."""

    attention_backend = "none"
    max_model_len = 0

    def __init__(self, max_num_seqs: int, step_s: float) -> None:
        self.identity = ModelIdentity("stub", "none")
        self.started: list[str] = []
        self.max_num_seqs = max_num_seqs
        self._step_s = step_s
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}
        self._num_steps = 0
        self._num_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def add(
        self, request_id: str, prompt: str | list[int], params: Params, *, lane: int = 0, **_: Any
    ) -> None:
        sequence = _Sequence(request_id, params.max_tokens)
        if lane == 0:
            self._waiting.appendleft(sequence)
        else:
            self._waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._waiting = deque(each for each in self._waiting if each.request_id != request_id)

    def step(self, *, launches: bool = True) -> list[Completion]:
        if not launches:
            return []
        time.sleep(self._step_s)
        self._num_steps += 1
        self.started = []
        while self._waiting and len(self._running) < self.max_num_seqs:
            sequence = self._waiting.popleft()
            self._running[sequence.request_id] = sequence
            self.started.append(sequence.request_id)
        done = []
        for sequence in list(self._running.values()):
            sequence.num_tokens += 1
            self._num_tokens += 1
            if sequence.num_tokens >= sequence.max_tokens:
                del self._running[sequence.request_id]
                done.append(self._completion(sequence))
        return done

    def _completion(self, sequence: _Sequence) -> Completion:
        text = text_of(sequence.num_tokens)
        ids = list(range(sequence.num_tokens))
        return Completion(sequence.request_id, 0, ids, text, "length", 1, 0)

    def texts_so_far(self, request_ids: Any) -> dict[str, dict[int, PartialText]]:
        texts = {}
        for request_id in request_ids:
            sequence = self._running.get(request_id)
            if sequence is not None:
                texts[request_id] = {
                    0: PartialText(None, text_of(sequence.num_tokens), range(sequence.num_tokens))
                }
        return texts

    def samples_so_far(self) -> dict[str, dict[int, list[int]]]:
        return {name: {0: list(range(each.num_tokens))} for name, each in self._running.items()}

    def progress(self) -> dict[str, RequestProgress]:
        return {
            name: RequestProgress(1, 0, each.num_tokens) for name, each in self._running.items()
        }

    def stats(self) -> EngineStats:
        running = len(self._running)
        waiting = len(self._waiting)
        return EngineStats(
            self._num_steps, running, running, waiting, 0, 0, 0, 0, 0, 0, self._num_tokens
        )

    def prepare(self, prompt: str | list[int], params: Params) -> str | list[int]:
        return prompt

    def prepare_chat(
        self, messages: list[dict[str, Any]], params: Params, **options: Any
    ) -> list[int]:
        return [1]

    def prepare_grammar(self, params: Params) -> None: ...

    def close(self) -> None: ...


def text_of(num_tokens: int) -> str:
    """Return the text of so many tokens."""
    return (TEXT * (num_tokens // len(TEXT) + 1))[:num_tokens]


class StubWorker(BatchWorker):
    """BatchWorker in all but the model."""

    def load_engine(self, settings: WorkerSettings) -> Any:
        return StubEngine(settings.max_num_seqs or 256, float(os.environ.get(STEP_VARIABLE, "0")))
