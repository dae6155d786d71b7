"""WeightedModule: a module whose parameters are filled from a checkpoint."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from engine.attention.layer_kernels import PackedKernels
from engine.checkpoint.quantized import PackableTensor
from engine.checkpoint.weights import CheckpointTensor
from engine.errors import WeightMismatch

#: Copies this rank's share of a shard's tensor into a parameter that is packed.
LoadPacked = Callable[[PackableTensor, str | None], None]


class WeightedModule(nn.Module):
    """A module whose own parameters are loaded from the checkpoint.

    shards: the parts each parameter is put together from; (None,) if the checkpoint holds it whole.
    """

    shards: tuple[str | None, ...] = (None,)

    def place_of(self, name: str) -> tuple[str, str | None] | None:
        """Return the parameter and shard that a tensor fills, by its name below this module; None if there is none."""
        return (name, None) if name in dict(self.named_parameters(recurse=False)) else None

    def shards_of(self, name: str) -> tuple[str | None, ...]:
        """Return the shards of parameter `name`."""
        return self.shards

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy the checkpoint's `tensor`, or this rank's share of it, into parameter `name`."""
        fill(self.get_parameter(name), tensor.whole())

    def keep_packed(
        self, name: str, tensors: Mapping[str | None, PackableTensor], kernels: PackedKernels
    ) -> LoadPacked | None:
        """Replace parameter `name` by one that holds its weights packed. Return what loads it; None if it stays plain.

        tensors: the checkpoint's, by shard. Called before anything is loaded, on the meta device.
        """
        return None

    def finish_loading(self) -> None:
        """Change the layout of parameters if need be; called once when all are filled."""


def fill(place: Tensor, tensor: Tensor) -> None:
    """Copy `tensor` into `place`, casting its dtype. Raises WeightMismatch unless the shapes are equal."""
    if place.shape != tensor.shape:
        raise WeightMismatch(f"shape {list(tensor.shape)} found, {list(place.shape)} expected")
    place.copy_(tensor)
