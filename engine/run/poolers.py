"""Prepares requests for embeddings and classes: their tokens, and what collects their hidden states."""

import numpy as np

from engine.checkpoint.folder import list_weight_files
from engine.checkpoint.heads import Classes
from engine.checkpoint.pooling import Dense, Pooling
from engine.checkpoint.weights import open_tensors
from engine.errors import (
    InvalidPrompt,
    InvalidSampling,
    MissingWeights,
    UnsupportedTask,
    WeightMismatch,
)
from engine.sampling.parameter_values import brief
from engine.sampling.request_kinds import ClassParams, PoolingParams
from engine.schedule.pooled import ClassStates, PooledStates, Vector
from engine.text.prompts import Prompt, PromptReader
from engine.text.tokenizer import Tokenizer


def _most_tokens(
    truncate_prompt_tokens: int | None, fitting: int, max_model_len: int
) -> int | None:
    """Return how many tokens a prompt is cut to; None for no cut. fitting: the number that -1 stands for."""
    if truncate_prompt_tokens is None:
        return None
    return fitting if truncate_prompt_tokens == -1 else min(truncate_prompt_tokens, max_model_len)


def _pooled_token_ids(
    prompt: object, most: int | None, tokenizer: Tokenizer, prompts: PromptReader
) -> list[int]:
    """Return the first `most` tokens of a prompt that is pooled.

    A text keeps the special tokens around it. (Generation keeps a prompt's last tokens instead.)
    Raises InvalidPrompt or PromptTooLong.
    """
    if most is not None:
        if isinstance(prompt, str):
            prompt = tokenizer.encode_cut(prompt, most)
        elif isinstance(prompt, (list, tuple)):
            prompt = prompt[:most]
    return prompts.token_ids(prompt, room=0)


class Embedder:
    """Prepares requests for embeddings. pooling: None if the checkpoint has none; every request is then refused."""

    def __init__(
        self, pooling: Pooling | None, hidden_size: int, tokenizer: Tokenizer, prompts: PromptReader
    ) -> None:
        self._pooling, self._tokenizer, self._prompts = pooling, tokenizer, prompts
        self.num_dimensions = 0 if pooling is None else pooling.size(hidden_size)
        self._dense = [] if pooling is None else [_DenseLayer(each) for each in pooling.dense]
        size = 0 if pooling is None else hidden_size * len(pooling.modes)
        for layer in self._dense:
            if layer.num_inputs != size:
                raise WeightMismatch(
                    f"modules.json: a Dense layer takes {layer.num_inputs} numbers, and gets {size}"
                )
            size = layer.num_outputs

    def token_ids(self, prompt: Prompt, params: PoolingParams) -> list[int]:
        """Tokenize a text behind the checkpoint's prompt, and cut it. Raises InvalidRequest or a subclass."""
        pooling = self.check(params)
        longest = self._prompts.max_model_len
        most = _most_tokens(params.truncate_prompt_tokens, longest, longest)
        if not isinstance(prompt, str):
            if params.prompt_name is not None:
                raise InvalidSampling("prompt_name is for texts: before token ids no prompt is put")
            return _pooled_token_ids(prompt, most, self._tokenizer, self._prompts)
        name = params.prompt_name if params.prompt_name is not None else pooling.default_prompt
        text = prompt if name is None else pooling.prompts[name] + prompt
        if pooling.max_seq_length is not None:
            most = pooling.max_seq_length if most is None else min(most, pooling.max_seq_length)
        return _pooled_token_ids(text, most, self._tokenizer, self._prompts)

    def states(self, params: PoolingParams, num_tokens: int) -> PooledStates:
        """Return the collector of a request's hidden states. Raises UnsupportedTask or InvalidSampling."""
        pooling = self.check(params)
        normalize = params.normalize
        if normalize is None:
            normalize = pooling.normalize or params.dimensions is not None
        return PooledStates(
            pooling.modes,
            num_tokens,
            dimensions=params.dimensions,
            normalize=normalize,
            project=self._project if self._dense else None,
        )

    def _project(self, pooled: Vector) -> Vector:
        for layer in self._dense:
            pooled = layer(pooled)
        return pooled

    def check(self, params: PoolingParams) -> Pooling:
        """Return the pooling. Raises UnsupportedTask if there is none, InvalidSampling for values it cannot have."""
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


class _DenseLayer:
    """A layer behind the pooling: pooled [in] -> [out], float32."""

    def __init__(self, dense: Dense) -> None:
        """Raise MissingWeights if its files are not there, or hold another layer."""
        with open_tensors(list_weight_files(dense.folder)) as tensors:
            if "linear.weight" not in tensors:
                raise MissingWeights(f"{dense.folder} has no linear.weight; fetch it again")
            self._weight: Vector = tensors["linear.weight"].whole().float().numpy()
            has_bias = "linear.bias" in tensors
            self._bias: Vector | float = (
                tensors["linear.bias"].whole().float().numpy() if has_bias else 0.0
            )
        self._activation = dense.activation
        self.num_outputs, self.num_inputs = self._weight.shape
        if self.num_outputs != dense.out_features:
            raise WeightMismatch(
                f"{dense.folder}: {self.num_outputs} features, {dense.out_features} by config.json"
            )

    def __call__(self, pooled: Vector) -> Vector:
        numbers: Vector = self._weight @ pooled + self._bias
        if self._activation == "Tanh":
            return np.tanh(numbers)
        return np.maximum(numbers, 0) if self._activation == "ReLU" else numbers


class Classifier:
    """Prepares requests for classes. classes: None if the checkpoint has no head; every request is then refused."""

    def __init__(
        self, classes: Classes | None, tokenizer: Tokenizer, prompts: PromptReader
    ) -> None:
        self._classes, self._tokenizer, self._prompts = classes, tokenizer, prompts

    def token_ids(self, prompt: Prompt, params: ClassParams) -> list[int]:
        """Tokenize a text, or a pair of texts. Raises InvalidRequest or a subclass."""
        self._check()
        longest = min(self._prompts.max_model_len, self._tokenizer.max_length)
        if params.pair is not None:
            if not isinstance(prompt, str):
                raise InvalidSampling("pair is for texts: behind token ids no text is put")
            token_ids = self._tokenizer.encode_pair(
                prompt, params.pair, longest, self._prompts.vocab_size
            )
            if not token_ids:
                raise InvalidPrompt("both texts are empty; they need at least one token")
            return token_ids
        most = _most_tokens(params.truncate_prompt_tokens, longest, self._prompts.max_model_len)
        return _pooled_token_ids(prompt, most, self._tokenizer, self._prompts)

    def states(self, params: ClassParams, num_tokens: int) -> PooledStates:
        """Return the collector of a request's scores. Raises UnsupportedTask."""
        return ClassStates(self._check(), num_tokens, of_pair=params.pair is not None)

    def _check(self) -> Classes:
        if self._classes is None:
            raise UnsupportedTask(
                "this checkpoint has no sequence-classification head; serve one that has"
            )
        return self._classes
