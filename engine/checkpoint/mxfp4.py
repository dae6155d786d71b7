"""Experts in MXFP4, as gpt-oss stores them, read as they are or unpacked."""

import torch
from torch import Tensor

from engine.checkpoint.packed_form import PackedForm, PackedPart, check_scales, damaged
from engine.checkpoint.weights import CheckpointTensor
from engine.kernels.products.codes import NUMBERS

BLOCK = 32


class Mxfp4Tensor(CheckpointTensor):
    """The weights of all experts, [experts, in, out], read in bfloat16, which holds them exactly.

    blocks: [experts, out, in / 32, 16] uint8, the lower half of a byte first. scales: [experts, out, in / 32]
    uint8, exponents with a bias of 127. Source: OCP Microscaling Formats 1.0, section 5.3.
    """

    def __init__(self, name: str, blocks: CheckpointTensor, scales: CheckpointTensor) -> None:
        self.name = name
        self.path = blocks.path
        self.dtype = "BF16"
        self._blocks = blocks
        self._scales = scales
        experts, rows, groups, _ = blocks.shape
        self.shape = (experts, groups * BLOCK, rows)

    @property
    def packed_form(self) -> PackedForm:
        """The form in which each expert's matrix [out, in] may stay packed."""
        return PackedForm("fp4", BLOCK, torch.bfloat16)

    def packed_part(self, expert: int, rows: slice, columns: slice, group: int) -> PackedPart:
        """Read these rows and columns of an expert's [out, in]. Raises DamagedWeights.

        group: the number of columns of the result that share a scale; BLOCK must be a multiple of it.
        """
        first_block = columns.start // BLOCK
        end_block = -(-columns.stop // BLOCK)
        blocks = self._blocks.part(slice(expert, expert + 1))[0][rows, first_block:end_block]
        first_column = columns.start - first_block * BLOCK
        end_column = columns.stop - first_block * BLOCK
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)[:, first_column:end_column]
        groups = torch.arange(columns.start, columns.stop, group) // BLOCK
        exponents = self._scales.part(slice(expert, expert + 1))[0][rows][:, groups]
        scales = _factors(exponents)
        check_scales(self._scales, scales, "fp4")
        return PackedPart(codes, scales, None)

    def part(self, *ranges: slice) -> Tensor:
        """Unpack these ranges. A dimension without a range is unpacked whole. Raises DamagedWeights."""
        blocks = self._blocks.part(*ranges[:1])
        scales = self._scales.part(*ranges[:1])
        unpacked = torch.stack(
            [
                _unpack(expert_blocks, expert_scales)
                for expert_blocks, expert_scales in zip(blocks, scales, strict=True)
            ]
        )
        if not unpacked.isfinite().all():
            raise damaged(self._scales, "holds scales that are NaN or too large")
        return unpacked[(slice(None), *ranges[1:])]


def _unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack blocks [out, groups, 16] with scales [out, groups] -> [in, out] bfloat16."""
    # By the value of a byte: the number in its lower half, and the one in its upper half.
    low = torch.tensor(NUMBERS["fp4"], dtype=torch.bfloat16).repeat(16)
    high = torch.tensor(NUMBERS["fp4"], dtype=torch.bfloat16).repeat_interleave(16)
    pairs = torch.stack((low, high), -1)[blocks.int()]
    return (pairs.flatten(2) * _factors(scales)[:, :, None]).flatten(1).t()


def _factors(exponents: Tensor) -> Tensor:
    """Return the powers of two that biased exponents stand for, in bfloat16; NaN for 255."""
    return exponents.contiguous().view(torch.float8_e8m0fnu).to(torch.bfloat16)
