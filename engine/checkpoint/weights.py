"""The tensors of a checkpoint, on disk until they are read."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import MissingWeights


class CheckpointTensor:
    """A tensor of an open safetensors file, with its shape and dtype, such as "BF16"; read on demand."""

    def __init__(self, file: Any, name: str, path: Path) -> None:
        self._file = file
        self.name = name
        self.path = path
        self._slice = file.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())
        self.dtype: str = self._slice.get_dtype()

    def whole(self) -> Tensor:
        """Read the whole tensor, on the CPU."""
        return self.part()

    def part(self, *ranges: slice) -> Tensor:
        """Read these ranges, on the CPU. A dimension without a range is read whole."""
        tensor: Tensor = self._slice[ranges] if ranges else self._file.get_tensor(self.name)
        return tensor

    def read(self, dim: int, start: int, length: int) -> Tensor:
        """Read `length` entries of dimension `dim` from `start`, on the CPU."""
        if length == self.shape[dim]:
            return self.whole()
        return self.part(*[slice(None)] * dim, slice(start, start + length))


@contextmanager
def open_tensors(files: Sequence[Path]) -> Iterator[dict[str, CheckpointTensor]]:
    """Open the tensors of these files by name, until the block ends. Raises MissingWeights."""
    with ExitStack() as stack:
        tensors = {}
        for path in files:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                for name in file.keys():  # noqa: SIM118 - the file object is no mapping
                    tensors[name] = CheckpointTensor(file, name, path)
            except SafetensorError as error:
                raise MissingWeights(
                    f"{path} is no complete safetensors file ({error}); fetch it again"
                ) from error
        yield tensors
