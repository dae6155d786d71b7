"""A worker whose engine never computes the same text twice, for streams that go on in another worker."""

import os
import random
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from engine import Completion, ModelIdentity, PartialText, SamplingParams
from tests.worker.fake_engine import FakeEngine, FakeEngineWorker
from worker.settings import WorkerSettings

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class UnsteadyEngine(FakeEngine):
    """Draws each token from the machine's randomness. A token is a letter. It reports texts as they grow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._random = random.SystemRandom()
        self._tokens: dict[str, list[int]] = {}
        self._num_resumed: dict[str, int] = {}

    def add(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        resumed: Mapping[int, Collection[int]] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        super().add(request_id, prompt, params, **options)
        self._tokens[request_id] = list(resumed.get(0, ()))
        self._num_resumed[request_id] = len(self._tokens[request_id])
        self.waiting[-1].steps = self._num_resumed[request_id]

    def step(self, *, launches: bool = True) -> list[Completion]:
        done = super().step(launches=launches)
        if launches:
            for sequence in self.running:
                self._draw(sequence.request_id)
        return done

    def _draw(self, request_id: str) -> None:
        self._tokens[request_id].append(self._random.randrange(len(LETTERS)))

    def _answer(self, sequence: Any, index: int) -> Completion:
        self._draw(sequence.request_id)
        token_ids = self._tokens[sequence.request_id]
        return Completion(
            request_id=sequence.request_id,
            index=index,
            token_ids=token_ids,
            text=text_of(token_ids),
            finish_reason="length",
            num_prompt_tokens=len(sequence.prompt),
            num_cached_tokens=0,
            num_continued=self._num_resumed[sequence.request_id],
        )

    def samples_so_far(self) -> dict[str, dict[int, list[int]]]:
        return {each.request_id: {0: list(self._tokens[each.request_id])} for each in self.running}

    def texts_so_far(self, request_ids: Any) -> dict[str, dict[int, PartialText]]:
        texts = {}
        for request_id, samples in self.samples_so_far().items():
            if request_id in request_ids:
                texts[request_id] = {0: PartialText(None, text_of(samples[0]), samples[0])}
        return texts


def text_of(token_ids: list[int]) -> str:
    return "".join(LETTERS[token_id] for token_id in token_ids)


class UnsteadyWorker(FakeEngineWorker):
    def load_engine(self, settings: WorkerSettings) -> Any:
        identity = ModelIdentity(f"fingerprint of {settings.model}", settings.dtype)
        step_s = float(os.environ["FAKE_STEP_S"])
        return UnsteadyEngine(settings.max_num_seqs or 256, step_s, identity=identity)
