"""PooledKind: the base of the kinds of requests that pool a prompt's hidden states."""

import time
from abc import abstractmethod
from typing import ClassVar

from engine.errors import SequenceFailed
from engine.run.kinds.request_kind import LoadedModel, NewRequest, Params, RequestKind
from engine.sampling.request_kinds import NO_NEW_TOKEN
from engine.schedule.outputs import Completion, RequestMetrics
from engine.schedule.pooled import PooledStates
from engine.schedule.prepared_prompt import PreparedPrompt
from engine.schedule.sequence import Sequence
from engine.text.prompts import Prompt


class PooledKind(RequestKind[Params]):
    """Pools a prompt's hidden states: one sequence that generates nothing, and one completion.

    result_field: the field of Completion that takes the pooled result.
    """

    result_field: ClassVar[str]
    reads_pictures = False

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._tokenizer = loaded.tokenizer
        self._prompts = loaded.prompts

    @abstractmethod
    def token_ids(self, prompt: Prompt, params: Params) -> list[int]:
        """Tokenize and cut a prompt, once the parameters are checked. Raises InvalidRequest or a subclass."""

    @abstractmethod
    def states(self, params: Params, num_tokens: int) -> PooledStates:
        """Return an object that collects the hidden states of a prompt of num_tokens tokens."""

    def prepare(self, prompt: Prompt, params: Params) -> PreparedPrompt:
        """Tokenize a prompt. It has no block keys if its sequence may share no blocks."""
        self.check(params)
        token_ids = self.token_ids(prompt, params)
        needs_all = self.states(params, len(token_ids)).needs_all
        return PreparedPrompt(token_ids, [] if needs_all else self._loaded.keys_of(token_ids))

    def sequences(self, request: NewRequest[Params]) -> list[Sequence]:
        """Make the one sequence whose hidden states are pooled."""
        token_ids = request.prompt.token_ids
        seq = Sequence(
            request.request_id,
            token_ids,
            NO_NEW_TOKEN,
            lane=request.lane,
            block_keys=request.prompt.block_keys,
            pooled=self.states(request.params, len(token_ids)),
        )
        return [seq]

    def completion(self, seq: Sequence) -> Completion:
        """Make the completion with the result, or with the sequence's error."""
        assert seq.finish_reason is not None
        assert seq.pooled is not None
        results = {}
        if seq.error is None:
            results[self.result_field] = seq.pooled.result()
        return Completion(
            request_id=seq.request_id,
            index=seq.index,
            token_ids=[],
            text="",
            finish_reason=seq.finish_reason,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=min(seq.num_cached_tokens or 0, seq.num_prompt_tokens),
            error=None if seq.error is None else str(SequenceFailed(seq.error)),
            metrics=RequestMetrics(seq.arrived_at, seq.first_token_at, time.monotonic()),
            **results,
        )

    def _first_token_ids(self, prompt: Prompt, most: int | None) -> list[int]:
        """Return the first `most` tokens of a prompt; None cuts nothing.

        A text keeps the special tokens around it. (Generation keeps a prompt's last tokens instead.)
        Raises InvalidPrompt or PromptTooLong.
        """
        if most is not None:
            if isinstance(prompt, str):
                prompt = self._tokenizer.encode_cut(prompt, most)
            elif isinstance(prompt, (list, tuple)):
                prompt = prompt[:most]
        return self._prompts.token_ids(prompt, room=0)

    def _most_tokens(self, truncate_prompt_tokens: int | None, fitting: int) -> int | None:
        """Return how many tokens a prompt is cut to; None for no cut. fitting: the number that -1 stands for."""
        if truncate_prompt_tokens is None:
            return None
        if truncate_prompt_tokens == -1:
            return fitting
        return min(truncate_prompt_tokens, self._prompts.max_model_len)
