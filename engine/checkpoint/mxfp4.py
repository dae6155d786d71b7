"""gpt-oss' experts: numbers of 4 bits (e2m1), 32 of them with one power of two."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checkpoint.weights import CheckpointTensor
from engine.errors import DamagedWeights

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK = 32


class Mxfp4Tensor(CheckpointTensor):
    """The weights [experts, in, out] of all experts; once read in bfloat16, which holds them exactly.

    blocks: [experts, out, in / 32, 16] uint8, the lower half of a byte first. scales: [experts, out, in / 32]
    uint8, exponents with a bias of 127. Source: OCP Microscaling Formats 1.0, section 5.3; the order of the
    dimensions is that of transformers' GptOssExperts.
    """

    def __init__(self, name: str, blocks: CheckpointTensor, scales: CheckpointTensor) -> None:
        self.name, self.path, self.dtype = name, blocks.path, "BF16"
        self._blocks, self._scales = blocks, scales
        experts, rows, groups, _ = blocks.shape
        self.shape = (experts, groups * BLOCK, rows)

    def whole(self) -> Tensor:
        """Unpack all of it, on the CPU. Raises DamagedWeights."""
        return self.part()

    def part(self, *ranges: slice) -> Tensor:
        """Unpack these ranges of the first dimensions, and all of the others. Raises DamagedWeights."""
        every = (slice(None),) * 3
        experts, columns, rows = (
            range(n)[each] for each, n in zip((*ranges, *every), self.shape, strict=False)
        )
        first = columns.start // BLOCK
        stored = (
            slice(experts.start, experts.stop),
            slice(rows.start, rows.stop),
            slice(first, -(-columns.stop // BLOCK)),
        )
        blocks, scales = self._blocks.part(*stored), self._scales.part(*stored)
        unpacked = torch.stack([_unpack(*expert) for expert in zip(blocks, scales, strict=True)])
        if not unpacked.isfinite().all():
            raise DamagedWeights(
                f"{self._scales.name!r} in {self._scales.path} holds scales that are NaN or too large; "
                "fetch the file again"
            )
        return unpacked.narrow(1, columns.start - first * BLOCK, len(columns))


def _unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks: [out, groups, 16], scales: [out, groups] -> [in, out] bfloat16."""
    low = torch.tensor(NUMBERS, dtype=torch.bfloat16).repeat(16)
    high = torch.tensor(NUMBERS, dtype=torch.bfloat16).repeat_interleave(16)
    pairs = torch.stack((low, high), -1)[blocks.int()]
    factors = scales.view(torch.float8_e8m0fnu).to(torch.bfloat16)
    return (pairs.flatten(2) * factors[:, :, None]).flatten(1).t()
