"""A worker whose engine computes nothing, for tests about queues; prompts steer it."""

import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from engine import (
    AdapterFolder,
    Completion,
    EngineStats,
    InvalidRequest,
    ModelIdentity,
    RequestParams,
    RequestProgress,
    SamplingParams,
)
from worker import BatchWorker
from worker.settings import WorkerSettings

MAX_MODEL_LEN = 1024


@dataclass
class _Sequence:
    request_id: str
    prompt: str
    params: SamplingParams
    lane: int
    steps: int = 0


@dataclass
class FakeEngine:
    """Answers each prompt with `echo:<prompt>` after max_tokens steps (at most MAX_MODEL_LEN), `max_num_seqs`
    sequences at a time. A worker's serves the model that its settings name, and looks for adapters' files.

    The prompt "hang" is never answered, "crash" makes the step raise, "refuse" is refused,
    "die" kills the process, "file:<path>" is answered once that file exists.
    """

    max_num_seqs: int
    step_s: float = 0.001
    waiting: deque[_Sequence] = field(default_factory=deque)
    running: list[_Sequence] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    num_steps: int = 0
    generation_tokens: int = 0
    max_running: int = 0
    identity: ModelIdentity = field(default_factory=lambda: ModelIdentity("fake", "float32"))
    attention_backend: str = "none"
    max_model_len: int = 0
    adapters: AdapterFolder = field(default_factory=lambda: AdapterFolder(None))

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        lane: int = 0,
        **_: Any,
    ) -> None:
        if prompt == "refuse" or not prompt:
            raise InvalidRequest("the prompt is empty or refused")
        if params.adapter is not None:
            self.adapters.find(params.adapter)
        self.waiting.append(_Sequence(request_id, str(prompt), params, lane))

    def abort(self, request_id: str) -> None:
        self.waiting = deque(s for s in self.waiting if s.request_id != request_id)
        self.running = [s for s in self.running if s.request_id != request_id]

    def texts_so_far(self, request_ids: Any) -> dict[str, Any]:
        return {}

    def samples_so_far(self) -> dict[str, dict[int, list[int]]]:
        return {}

    def step(self, *, launches: bool = True) -> list[Completion]:
        if not launches:
            return []
        time.sleep(
            self.step_s
        )  # what a forward pass takes: without it a hanging prompt spins a core
        self.num_steps += 1
        self.started = []
        while self.waiting and len(self.running) < self.max_num_seqs:
            first = min(self.waiting, key=lambda s: s.lane)
            self.waiting.remove(first)
            self.running.append(first)
            self.started.append(first.request_id)
        self.max_running = max(self.max_running, len(self.running))
        done = []
        for sequence in list(self.running):
            if sequence.prompt == "crash":
                raise RuntimeError("the fake engine was told to crash")
            if sequence.prompt == "die":
                os.kill(os.getpid(), 9)
            sequence.steps += 1
            self.generation_tokens += sequence.prompt != "hang"
            if self._is_held(sequence):
                continue
            if sequence.steps >= min(sequence.params.max_tokens, MAX_MODEL_LEN):
                self.running.remove(sequence)
                done += [self._answer(sequence, index) for index in range(sequence.params.n)]
        return done

    def _is_held(self, sequence: _Sequence) -> bool:
        kind, _, path = sequence.prompt.partition(":")
        return kind == "hang" or (kind == "file" and not os.path.exists(path))

    def _answer(self, sequence: _Sequence, index: int) -> Completion:
        return Completion(
            request_id=sequence.request_id,
            index=index,
            token_ids=list(range(sequence.steps)),
            text=f"echo:{sequence.prompt}",
            finish_reason="length",
            num_prompt_tokens=len(sequence.prompt),
            num_cached_tokens=0,
        )

    def progress(self) -> dict[str, RequestProgress]:
        return {
            each.request_id: RequestProgress(len(each.prompt), 0, each.params.n * each.steps)
            for each in self.running
        }

    def stats(self) -> EngineStats:
        return EngineStats(
            num_steps=self.num_steps,
            num_running=len(self.running),
            max_running=self.max_running,
            num_waiting=len(self.waiting),
            num_preemptions=0,
            prefill_tokens=0,
            cached_tokens=0,
            decode_tokens=0,
            num_blocks=0,
            free_blocks=0,
            generation_tokens=self.generation_tokens,
        )

    def chat_token_ids(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        return list(str(messages[-1]["content"]).encode())

    def prepare_grammar(self, params: RequestParams) -> None:
        pass

    def prepare(self, prompt: Any, params: RequestParams | None = None) -> Any:
        if isinstance(prompt, list) and any(not isinstance(part, int) for part in prompt):
            return "".join(
                part if isinstance(part, str) else shown_picture(part) for part in prompt
            )
        return prompt

    def prepare_chat(
        self, messages: list[dict[str, Any]], params: RequestParams | None = None, **options: Any
    ) -> Any:
        contents = [message["content"] for message in messages]
        if any(
            part.get("type") == "image"
            for content in contents
            if isinstance(content, list)
            for part in content
        ):
            (content,) = contents
            return self.prepare([part.get("text", part.get("image")) for part in content])
        return self.prepare(self.chat_token_ids(messages, **options))

    def close(self) -> None:
        self.waiting.clear()
        self.running.clear()


def shown_picture(picture: Any) -> str:
    """Return a picture as the echo has it: its size, and its first pixel."""
    height, width, _ = picture.shape
    return f"<{width}x{height} {','.join(map(str, picture[0, 0]))}>"


class FakeEngineWorker(BatchWorker):
    """BatchWorker in all but the model."""

    def load_engine(self, settings: WorkerSettings) -> Any:
        if os.environ.get("SLOW_FILES_S"):
            # Not before: it loads Arrow, whose allocator a worker chooses when it starts.
            from tests.slow_files import slow_down

            slow_down()
        if seconds := os.environ.get("PERIODS_S"):  # of what takes ten otherwise
            from worker import assembly
            from worker.io_thread import maintenance
            from worker.store import scheduler

            assembly.REDIS_TIMEOUT_S = maintenance._LEFT_PERIOD_S = scheduler._REACQUIRE_S = float(
                seconds
            )
        if seconds := os.environ.get("CLOCK_AHEAD_S"):
            from tests.faults import clock

            clock.install()
            clock.jump(float(seconds))
        identity = ModelIdentity(f"fingerprint of {settings.model}", settings.dtype)
        step_s = float(os.environ.get("FAKE_STEP_S", "0.001"))
        adapters = AdapterFolder(settings.adapters)
        return FakeEngine(
            settings.max_num_seqs or 256, step_s, identity=identity, adapters=adapters
        )
