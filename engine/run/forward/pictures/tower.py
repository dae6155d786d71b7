"""Tower: the part of a transformers model that computes the features of pictures for the rest of the model."""

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import PictureRows
from engine.errors import UnsupportedModel
from engine.kernels.upload import upload
from engine.models.transformers_model import TransformersModel
from engine.schedule.pictures import SeenPicture, StepPictures

MAX_KEPT_BYTES = 1 << 29  # features of pictures that no request needs any more
GIVEN = "mm_encoder_outputs"  # the argument by which a body takes a tower's output
ROWS = "pooler_output"
BY_LAYER = "deepstack_features"


class _Form(NamedTuple):
    """The form of a tower's output.

    num_dims: dimensions of the features' tensor; 0 if they are a list.  has_layers: whether features for more layers
    come with them.
    """

    kind: Any
    num_dims: int
    has_layers: bool

    def output(self, features: list[Tensor]) -> Any:
        """Put features, [rows, hidden] each, into an output of this form."""
        rows, *layers = features
        written: dict[str, Any] = {ROWS: [rows]}
        if self.num_dims == 2:
            written[ROWS] = rows
        elif self.num_dims:
            written[ROWS] = rows[None]
        if self.has_layers:
            written[BY_LAYER] = [[layer] for layer in layers]
        return self.kind(**written)


class Tower:
    """Computes the features of pictures, once for equal ones."""

    def __init__(
        self,
        model: TransformersModel,
        placeholder_id: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Raise UnsupportedModel if the model takes features in another way."""
        self.model = model
        self._body = cast(Any, model.body)
        self._compute: Any = getattr(self._body, "get_image_features", None)
        if (
            self._compute is None
            or GIVEN not in inspect.signature(type(self._body).forward).parameters
        ):
            raise UnsupportedModel(
                f"{type(self._body).__name__} of transformers {version('transformers')} takes no features of pictures"
            )
        self._placeholder_id = placeholder_id
        self.device = device
        self._dtype = dtype
        self._kept: OrderedDict[bytes, SeenPicture] = OrderedDict()
        self._kept_bytes = 0
        self._form: _Form | None = None
        self.has_positions = hasattr(self._body, "get_rope_index")

    @property
    def shortest_window(self) -> int | None:
        """The tokens of the model's shortest window, or None."""
        windows = [
            size
            for layer in self.model.attention_layers
            for size in (layer.window, layer.chunk)
            if size is not None
        ]
        return min(windows, default=None)

    @property
    def names(self) -> tuple[frozenset[str], frozenset[str]]:
        """Two sets: the names of the tower's inputs, and of the pictures' sizes, from which positions are made."""
        sizes = (
            inspect.signature(self._body.get_rope_index).parameters if self.has_positions else {}
        )
        taken = inspect.signature(self._compute).parameters
        return frozenset(taken), frozenset(name for name in sizes if name.startswith("image"))

    def positions(
        self, token_ids: list[int], kinds: list[int], sizes: Mapping[str, Any]
    ) -> NDArray[np.int64] | None:
        """Return the tokens' positions, [3, tokens]; None for a model whose tokens have one position each."""
        if not self.has_positions:
            return None
        values_by_name = {
            "input_ids": token_ids,
            "mm_token_type_ids": kinds,
            "attention_mask": [1] * len(token_ids),
        }
        known = inspect.signature(self._body.get_rope_index).parameters
        rows = {
            name: torch.tensor([values]) for name, values in values_by_name.items() if name in known
        }
        positions, _ = self._body.get_rope_index(**rows, **sizes)
        columns: NDArray[np.int64] = positions[:, 0].numpy()
        return columns

    @torch.inference_mode()
    def look(self, picture: SeenPicture) -> None:
        """Compute a picture's features unless they are there, and mark it as used last. Raises what the tower does."""
        if picture.features is None:
            assert picture.inputs is not None
            inputs = {name: self.to_device(value) for name, value in picture.inputs.items()}
            output = self._compute(**inputs, return_dict=True)
            layers = getattr(output, BY_LAYER, None)
            features = [_flat(values) for values in (output[ROWS], *(layers or ()))]
            if any(len(part) != picture.num_rows for part in features):
                raise UnsupportedModel(
                    f"{len(features[0])} features came for {picture.num_rows} places"
                )
            num_dims = 0 if isinstance(output[ROWS], (list, tuple)) else output[ROWS].ndim
            self._form = _Form(type(output), num_dims, layers is not None)
            picture.features = features
            picture.inputs = None
        self._keep(picture)

    def rows(self, step: StepPictures, token_ids: Tensor) -> PictureRows:
        """Bring a step's features to the device. token_ids: [tokens], of the whole step."""
        positions = None
        if step.positions is not None:
            positions = upload([step.positions], self.device)[0][:, None]
        if not step.parts:
            return PictureRows({}, positions)
        features_of_each = [
            [values[first:end] for values in picture.features or ()]
            for picture, first, end in step.parts
        ]
        features = [
            torch.cat(parts).to(self.device) for parts in zip(*features_of_each, strict=True)
        ]
        places = (token_ids == self._placeholder_id).nonzero()[:, 0]
        if len(places) > len(step.rows):
            # the model has generated placeholders, which stand for no picture
            (rows,) = upload([step.rows], self.device)
            embedded = self._body.get_input_embeddings()(token_ids[places])
            wholes = [
                embedded,
                *(part.new_zeros(len(places), part.shape[1]) for part in features[1:]),
            ]
            picture_places = torch.searchsorted(places, rows)
            features = [
                whole.index_copy(0, picture_places, part.to(whole.dtype))
                for whole, part in zip(wholes, features, strict=True)
            ]
        assert self._form is not None, "there are features"
        return PictureRows({GIVEN: {"image": self._form.output(features)}}, positions)

    def to_device(self, value: Any) -> Any:
        """Move an input to the model's device. Floating-point tensors also take the model's dtype."""
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device, self._dtype if value.is_floating_point() else None)

    def _keep(self, picture: SeenPicture) -> None:
        assert picture.features is not None
        if picture.digest not in self._kept:
            self._kept[picture.digest] = picture
            self._kept_bytes += _num_bytes(picture)
        self._kept.move_to_end(picture.digest)
        while self._kept_bytes > MAX_KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= _num_bytes(oldest)


def _flat(values: Any) -> Tensor:
    """Return rows, [any, hidden], on the host. values: one tensor or several, of any number of dimensions."""
    parts = values if isinstance(values, (list, tuple)) else [values]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).cpu()


def _num_bytes(picture: SeenPicture) -> int:
    assert picture.features is not None
    return sum(part.nbytes for part in picture.features)
