"""Embed: requests for the embeddings of texts."""

import numpy as np

from engine.checkpoint.folder import list_weight_files
from engine.checkpoint.pooling import Dense, Pooling
from engine.checkpoint.weights import open_tensors
from engine.errors import InvalidSampling, MissingWeights, UnsupportedTask, WeightMismatch
from engine.run.kinds.pooled_kind import PooledKind
from engine.run.kinds.request_kind import LoadedModel
from engine.sampling.parameter_values import brief
from engine.sampling.request_kinds import PoolingParams
from engine.schedule.pooled import PooledStates, Vector
from engine.text.prompts import Prompt


class Embed(PooledKind[PoolingParams]):
    """Embeds texts, by a checkpoint that says how its hidden states are pooled."""

    params = PoolingParams
    result_field = "embedding"

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._pooling = loaded.pooling
        self._layers: list[_DenseLayer] = []
        self._num_dimensions = 0
        if loaded.pooling is not None:
            hidden_size = loaded.model.hidden_size
            self._layers = _open_layers(loaded.pooling, hidden_size)
            self._num_dimensions = loaded.pooling.size(hidden_size)

    def check(self, params: PoolingParams) -> None:
        """Raise UnsupportedTask if the checkpoint has no pooling, InvalidSampling for parameters that do not fit it."""
        pooling = self._known_pooling()
        if params.dimensions is not None and params.dimensions > self._num_dimensions:
            raise InvalidSampling(
                f"dimensions={params.dimensions}: this checkpoint's embeddings have {self._num_dimensions}"
            )
        if params.prompt_name is not None and params.prompt_name not in pooling.prompts:
            known = ", ".join(sorted(pooling.prompts)) or "none"
            raise InvalidSampling(f"prompt_name must be of {known}", brief(params.prompt_name))

    def token_ids(self, prompt: Prompt, params: PoolingParams) -> list[int]:
        """Put the checkpoint's prompt before a text; tokenize both, and cut. Raises InvalidRequest or a subclass."""
        pooling = self._known_pooling()
        most = self._most_tokens(params.truncate_prompt_tokens, self._prompts.max_model_len)
        if not isinstance(prompt, str):
            if params.prompt_name is not None:
                raise InvalidSampling(
                    "prompt_name is for texts: a prompt of token ids cannot have one"
                )
            return self._first_token_ids(prompt, most)
        name = params.prompt_name if params.prompt_name is not None else pooling.default_prompt
        text = prompt if name is None else pooling.prompts[name] + prompt
        if pooling.max_seq_length is not None:
            most = pooling.max_seq_length if most is None else min(most, pooling.max_seq_length)
        return self._first_token_ids(text, most)

    def states(self, params: PoolingParams, num_tokens: int) -> PooledStates:
        """Return an object that collects a text's hidden states."""
        pooling = self._known_pooling()
        normalize = params.normalize
        if normalize is None:
            normalize = pooling.normalize or params.dimensions is not None
        return PooledStates(
            pooling.modes,
            num_tokens,
            dimensions=params.dimensions,
            normalize=normalize,
            project=self._project if self._layers else None,
        )

    def _project(self, pooled: Vector) -> Vector:
        for layer in self._layers:
            pooled = layer(pooled)
        return pooled

    def _known_pooling(self) -> Pooling:
        if self._pooling is None:
            raise UnsupportedTask(
                "this checkpoint has no pooling configuration (modules.json beside its weights), so it gives "
                "no embeddings; serve one that has, or set pooling"
            )
        return self._pooling


def _open_layers(pooling: Pooling, hidden_size: int) -> list["_DenseLayer"]:
    """Open the layers behind the pooling. Raises MissingWeights or WeightMismatch."""
    layers = [_DenseLayer(dense) for dense in pooling.dense]
    size = hidden_size * len(pooling.modes)
    for layer in layers:
        if layer.num_inputs != size:
            raise WeightMismatch(
                f"modules.json: a Dense layer takes {layer.num_inputs} numbers, and gets {size}"
            )
        size = layer.num_outputs
    return layers


class _DenseLayer:
    """A layer behind the pooling: pooled [in] -> [out], float32."""

    def __init__(self, dense: Dense) -> None:
        """Raise MissingWeights if its files are not there, WeightMismatch if they hold another layer."""
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
