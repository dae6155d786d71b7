"""The tensors of a checkpoint that make up one quantized module."""

from collections.abc import Mapping

from engine.checkpoint.weights import CheckpointTensor
from engine.errors import MissingWeights, WeightMismatch

FLOATS = ("F32", "BF16", "F16")


class Parts:
    """The tensors of one quantized module."""

    def __init__(self, tensors: Mapping[str, CheckpointTensor], module: str) -> None:
        self._tensors = tensors
        self.module = module

    def holds(self, part: str) -> bool:
        """Whether the files have this part."""
        return f"{self.module}.{part}" in self._tensors

    def matrix(self, part: str, dtype: str) -> CheckpointTensor:
        """Return a part that is a matrix. Raises MissingWeights or WeightMismatch, as `get` does."""
        tensor = self.get(part, (dtype,))
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise WeightMismatch(
                f"{tensor.name!r} in {tensor.path} has shape {list(tensor.shape)}, a matrix expected"
            )
        return tensor

    def get(self, part: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> CheckpointTensor:
        """Return a part, which must have one of these dtypes and, if shapes are given, one of these shapes."""
        name = f"{self.module}.{part}"
        if name not in self._tensors:
            raise MissingWeights(
                f"{self.module!r} is quantized and {name!r} is in no file of the checkpoint; fetch it again"
            )
        tensor = self._tensors[name]
        if tensor.dtype not in dtypes:
            raise WeightMismatch(
                f"{name!r} in {tensor.path} holds {tensor.dtype}, {' or '.join(dtypes)} expected by "
                "quantization_config in config.json"
            )
        if shapes and tensor.shape not in shapes:
            raise WeightMismatch(
                f"{name!r} in {tensor.path} has shape {list(tensor.shape)}, {list(shapes[0])} expected by "
                "its weight and quantization_config in config.json"
            )
        return tensor
