"""Embedder: what a request for an embedding becomes, by the checkpoint's way of making them."""

from __future__ import annotations

from engine.checkpoint.pooling import Pooling
from engine.errors import InvalidSampling, UnsupportedTask
from engine.sampling.parameters.pooling import PoolingParams
from engine.sampling.parameters.ranges import brief
from engine.schedule.sequences.pooled import PooledStates
from engine.text.prompts import Prompt, PromptReader
from engine.text.tokenizer import Tokenizer


class Embedder:
    """pooling: None for a checkpoint that says nothing of embeddings: each call is refused then."""

    def __init__(
        self, pooling: Pooling | None, hidden_size: int, tokenizer: Tokenizer, prompts: PromptReader
    ) -> None:
        self._pooling, self._tokenizer, self._prompts = pooling, tokenizer, prompts
        self.num_dimensions = 0 if pooling is None else hidden_size * len(pooling.modes)

    def token_ids(self, prompt: Prompt, params: PoolingParams) -> list[int]:
        """Tokenize a text behind the checkpoint's prompt, cut as the checkpoint says; token ids stay.

        Raises UnsupportedTask, InvalidSampling, InvalidPrompt or PromptTooLong.
        """
        pooling, most = self._checked(params), params.truncate_prompt_tokens
        if not isinstance(prompt, str):
            if params.prompt_name is not None:
                raise InvalidSampling("prompt_name is for texts: before token ids no prompt is put")
            return self._prompts.token_ids(prompt, truncate_prompt_tokens=most, room=0)
        name = params.prompt_name if params.prompt_name is not None else pooling.default_prompt
        text = prompt if name is None else pooling.prompts[name] + prompt
        longest = pooling.max_seq_length
        cut = text if longest is None else self._tokenizer.encode_cut(text, longest)
        return self._prompts.token_ids(cut, truncate_prompt_tokens=most, room=0)

    def states(self, params: PoolingParams, num_tokens: int) -> PooledStates:
        """Return what collects a request's hidden states. Raises UnsupportedTask or InvalidSampling."""
        pooling = self._checked(params)
        normalize = params.normalize
        if normalize is None:
            normalize = pooling.normalize or params.dimensions is not None
        return PooledStates(pooling.modes, num_tokens, dimensions=params.dimensions, normalize=normalize)

    def check(self, params: PoolingParams) -> None:
        """Raise UnsupportedTask, or InvalidSampling for values that this checkpoint cannot have."""
        self._checked(params)

    def _checked(self, params: PoolingParams) -> Pooling:
        pooling = self._pooling
        if pooling is None:
            raise UnsupportedTask(
                "this checkpoint has no pooling configuration (modules.json beside its weights), so it gives "
                "no embeddings; serve one that has, or set pooling"
            )
        if params.dimensions is not None and params.dimensions > self.num_dimensions:
            raise InvalidSampling(
                f"dimensions={params.dimensions}: this checkpoint's embeddings have {self.num_dimensions}"
            )
        if params.prompt_name is not None and params.prompt_name not in pooling.prompts:
            known = ", ".join(sorted(pooling.prompts)) or "none"
            raise InvalidSampling(f"prompt_name must be of {known}", brief(params.prompt_name))
        return pooling
