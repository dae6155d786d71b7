"""Small integers in words of 32 bits, as AWQ, GPTQ and compressed-tensors each pack them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checkpoint.weights import CheckpointTensor

EVERY = slice(None), slice(None)
LOW_BITS = {4: 0x11111111, 8: 0x01010101}


def unpack(words: Tensor, bits: int, dim: int, *, interleaved: bool = False, shift: int = 0) -> Tensor:
    """words: [rows, columns] int32, each of 32 / bits numbers of 4 or 8 bits along `dim` -> uint8.

    The first number has the lowest bits. interleaved: as AWQ has it, the even ones of eight in the lower half
    of a word and the odd ones in the upper. shift: 1 adds one to each number, as GPTQ's files subtract it:
    from whole words, so that a number of 0 borrows from the next.
    """
    if dim == 0:
        return unpack(words.t(), bits, 1, interleaved=interleaved, shift=shift).t()
    if shift:
        words = (words.long() + LOW_BITS[bits]).int()
    # A column of one word calls itself contiguous whatever its strides are, and cannot be seen as bytes.
    numbers = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:
        numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)
    if interleaved:
        numbers = numbers.view(*words.shape, 2, 4).transpose(2, 3).flatten(1)
    return numbers


class PackedIntegers:
    """A matrix [rows, columns] of packed numbers; of the words no more are read than hold those asked for.

    words: as stored; with `transposed` they hold the matrix's transpose. dim: of the words, along which each
    word's numbers lie. shape: the matrix's, whose last words may have room for more.
    """

    def __init__(
        self,
        words: CheckpointTensor,
        shape: tuple[int, ...],
        bits: int,
        *,
        dim: int,
        transposed: bool,
        interleaved: bool = False,
        shift: int = 0,
    ) -> None:
        self.words, self.path, self.shape, self.bits = words, words.path, shape, bits
        self.dim, self.transposed, self.interleaved, self.shift = dim, transposed, interleaved, shift

    def part(self, *ranges: slice) -> Tensor:
        """These rows and columns, uint8; all of them where no range is given."""
        wanted = [range(total)[each] for each, total in zip((*ranges, *EVERY), self.shape, strict=False)]
        if self.transposed:
            wanted.reverse()
        size = 32 // self.bits
        along = wanted[self.dim]
        first = along.start // size
        stored = [slice(each.start, each.stop) for each in wanted]
        stored[self.dim] = slice(first, -(-along.stop // size))
        numbers = unpack(
            self.words.part(*stored), self.bits, self.dim, interleaved=self.interleaved, shift=self.shift
        ).narrow(self.dim, along.start - first * size, len(along))
        return numbers.t() if self.transposed else numbers
