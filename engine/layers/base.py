"""What every layer with weights has in common: it takes tensors of the checkpoint one by one."""

from __future__ import annotations

from torch import Tensor, nn

from engine.checkpoint.weights import CheckpointTensor
from engine.errors import WeightMismatch


class WeightedModule(nn.Module):
    """A module whose own parameters are loaded from the checkpoint.

    shards: the parts each parameter is put together from; (None,) if the checkpoint holds it whole.
    """

    shards: tuple[str | None, ...] = (None,)

    def place_of(self, name: str) -> tuple[str, str | None] | None:
        """Which parameter, and which shard of it, a tensor of that name below this module's is, if any."""
        return (name, None) if name in dict(self.named_parameters(recurse=False)) else None

    def shards_of(self, name: str) -> tuple[str | None, ...]:
        """The shards of parameter `name`."""
        return self.shards

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy the checkpoint's `tensor`, or this rank's share of it, into parameter `name`."""
        fill(self.get_parameter(name), tensor.whole())

    def finish_loading(self) -> None:
        """Called once when all parameters are filled; they may change their layout."""


def fill(place: Tensor, tensor: Tensor) -> None:
    """Copy `tensor` into `place`, casting its dtype. Raises WeightMismatch unless the shapes are equal."""
    if place.shape != tensor.shape:
        raise WeightMismatch(f"shape {list(tensor.shape)} found, {list(place.shape)} expected")
    place.copy_(tensor)
