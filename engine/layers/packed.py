"""Products with a weight that stays in 4 or 8 bits, as a checkpoint stores it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.attention.layer_kernels import PackedKernels
from engine.checkpoint.packed_form import PackedForm, PackedPart
from engine.checkpoint.quantized import PackableTensor
from engine.kernels.products.codes import BITS, INTEGERS

WORD_BYTES = 4
#: The order of a word's columns: those of two bytes apart are multiplied together.
INT4_BYTES = ((0, 2), (4, 6), (1, 3), (5, 7))
BYTE_ORDER = (0, 2, 1, 3)


class Place(NamedTuple):
    """The part of a checkpoint's matrix that a layer takes, and where the layer puts it.

    rows, columns: of the checkpoint's matrix.  start: the layer's row for the first of `rows`.
    """

    start: int
    rows: slice
    columns: slice


class PackedProduct(nn.Module):
    """x W^T + b with W in 4 or 8 bits, which is unpacked on the way to the processor's registers.

    words: [out, words of a row, 4] uint8; a word holds the codes of 8 or 4 adjacent columns.
    scales, zeros: [out, groups]. zeros are uint8, as codes are.
    `finish_loading` lays them out as the kernel reads them.
    """

    def __init__(
        self,
        form: PackedForm,
        in_features: int,
        out_features: int,
        kernels: PackedKernels,
        block: int,
    ) -> None:
        super().__init__()
        self.form = form
        self.block = block
        self.kernels = kernels
        self.in_features = in_features
        self.out_features = out_features
        words, scales, zeros = empty_parts(form, in_features, out_features)
        self.words, self.scales, self.zeros = map(frozen, (words, scales, zeros))

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [rows, in] -> [rows, out], in x's dtype; sums are float32, and rounded once."""
        return self.kernels.product(
            x, self.words, self.scales, self.zeros, bias, self.out_features, self.block,
            self.form.kind,
        )  # fmt: skip

    def fill(self, start: int, part: PackedPart) -> None:
        """Put rows of a weight in their place, from row `start` on."""
        fill_rows(self.words, self.scales, self.zeros, start, part, self.form.kind)

    def finish_loading(self) -> None:
        """Lay the weight out as the kernel reads it."""
        laid_out = self.kernels.lay_out(self.words.data, self.scales.data, self.zeros.data)
        self.words, self.scales, self.zeros = map(frozen, laid_out)


def empty_parts(
    form: PackedForm, in_features: int, out_features: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return words [out, words of a row, 4], scales [out, groups] and zeros [out, groups], all to be filled.

    Only integer codes have zero points; for other codes zeros is [out, 0].
    """
    num_groups = 1 if form.group is None else in_features // form.group
    num_words = in_features * BITS[form.kind] // (8 * WORD_BYTES)
    num_zeros = num_groups if form.kind in INTEGERS else 0
    return (
        torch.empty(out_features, num_words, WORD_BYTES, dtype=torch.uint8),
        torch.empty(out_features, num_groups, dtype=form.scale_dtype),
        torch.empty(out_features, num_zeros, dtype=torch.uint8),
    )


def fill_rows(
    words: Tensor, scales: Tensor, zeros: Tensor, start: int, part: PackedPart, kind: str
) -> None:
    """Put rows of a weight in their place, from row `start` on. words, scales, zeros: as in `empty_parts`."""
    rows = slice(start, start + len(part.codes))
    words[rows] = pack_words(part.codes, kind)
    scales[rows] = part.scales
    if part.zeros is not None:
        zeros[rows] = part.zeros


def pack_words(codes: Tensor, kind: str) -> Tensor:
    """Pack codes [rows, columns] uint8 into words [rows, words of a row, 4]."""
    if BITS[kind] == 8:
        return codes.reshape(len(codes), -1, WORD_BYTES)[:, :, BYTE_ORDER]
    codes = codes.reshape(len(codes), -1, 2 * WORD_BYTES)
    bytes_of_words = [codes[:, :, low] | (codes[:, :, high] << 4) for low, high in INT4_BYTES]
    return torch.stack(bytes_of_words, -1)


class PackedLayout(NamedTuple):
    """How weights stay packed: their form, and how many columns the kernel unpacks together."""

    form: PackedForm
    block: int


def shared_layout(
    tensors: Iterable[PackableTensor],
    places: Iterable[Place],
    in_features: int,
    kernels: PackedKernels,
) -> PackedLayout | None:
    """Return the layout of a matrix that is filled from these tensors; None if they cannot stay packed.

    Their forms must be equal.
    """
    forms = {tensor.packed_form for tensor in tensors}
    if len(forms) > 1:
        return None
    form = forms.pop()
    if form is None:
        return None
    cuts: list[int] = []
    for place in places:
        cuts += (place.columns.start, place.columns.stop)
    return layout_of(form, in_features, kernels, cuts)


def layout_of(
    form: PackedForm, in_features: int, kernels: PackedKernels, cuts: Sequence[int] = ()
) -> PackedLayout | None:
    """Return the layout of rows of `in_features` columns; None if the kernels cannot multiply such rows packed.

    cuts: the columns of stored rows at which parts of them begin and end. A part, such as a rank's, may begin or end
    inside a group. Then groups are smaller, and several have the scale of the stored group.
    """
    group = in_features if form.group is None else gcd(form.group, in_features, *cuts)
    block = kernels.block(form.kind, group)
    if block is None:
        return None
    if form.group is not None:
        form = replace(form, group=group)
    return PackedLayout(form, block)


def pack_product(
    tensors: Iterable[PackableTensor],
    places: Sequence[Place],
    in_features: int,
    out_features: int,
    kernels: PackedKernels,
) -> PackedProduct | None:
    """Return a product for these weights, on the meta device; None if they cannot stay packed.

    places: the places of all parts of these tensors.
    """
    layout = shared_layout(tensors, places, in_features, kernels)
    if layout is None:
        return None
    with torch.device("meta"):
        return PackedProduct(layout.form, in_features, out_features, kernels, layout.block)


def frozen(tensor: Tensor) -> nn.Parameter:
    """Return the tensor as a parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)
