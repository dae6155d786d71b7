"""Measures products with packed weights beside oneDNN's bfloat16 product on a CPU.

    python -m ops.bench.kernels.packed
    python -m ops.bench.kernels.packed --kinds "int4 in groups of 128" --rows 64

The table shows oneDNN's time divided by ours. Both run on one thread, in turns, and the best of all rounds counts.
Several weights of a size alternate, so that they are read from memory and not from caches, as a model's layers are.
The processor needs AVX-512 and bfloat16.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from engine.attention.cpu_backend import CpuBackend
from engine.attention.layer_kernels import PackedKernels
from engine.checkpoint.packed_form import PackedForm, PackedPart
from engine.kernels.products.codes import BITS, INTEGERS
from engine.layers.onednn import linear, pack_weight
from engine.layers.packed import PackedProduct
from ops.bench.report import print_machine, print_table

#: Output and input features: queries, keys and values of Qwen3-0.6B, and the down projection of Qwen2.5-3B.
SIZES = ((4096, 1024), (2048, 11_008))
NUM_WEIGHTS = 8  # of a size, together more than the caches of most processors
FP8_NAN = 127  # without its sign


class NotPackedError(Exception):
    """Raised if this processor does not keep weights of a kind packed."""


@dataclass(frozen=True)
class Kind:
    """How a weight is packed. group: the number of columns that share a scale; None for one scale a row."""

    codes: str
    group: int | None
    scale_dtype: torch.dtype = torch.float16


KINDS = {
    "int4 in groups of 128": Kind("int4", 128),
    "int4 in groups of 32": Kind("int4", 32),
    "fp8 by channel": Kind("fp8", None),
    "int8 by channel": Kind("int8", None),
    "MXFP4": Kind("fp4", 32),
    "nf4 in blocks of 64": Kind("nf4", 64, torch.float32),
}


def make_packed(
    kind: Kind, out_features: int, in_features: int, kernels: PackedKernels
) -> PackedProduct:
    """A product with random codes. Raises NotPackedError."""
    group = kind.group or in_features
    block = kernels.block(kind.codes, group)
    if block is None:
        raise NotPackedError(f"weights of {kind.codes} are unpacked on this processor")
    num_codes = 1 << BITS[kind.codes]
    codes = torch.randint(0, num_codes, (out_features, in_features)).to(torch.uint8)
    if kind.codes == "fp8":
        is_nan = (codes & FP8_NAN) == FP8_NAN
        codes[is_nan] = 1
    groups = (out_features, in_features // group)
    zeros = None
    if kind.codes in INTEGERS:
        zeros = torch.randint(0, num_codes, groups).to(torch.uint8)
    scales = torch.rand(groups)
    if kind.codes == "fp4":
        scales = 2 ** torch.floor(8 * scales - 8)  # powers of two, as MXFP4 has them
    packed = PackedProduct(
        PackedForm(kind.codes, kind.group, kind.scale_dtype),
        in_features,
        out_features,
        kernels,
        block,
    )
    packed.fill(0, PackedPart(codes, scales.to(kind.scale_dtype), zeros))
    packed.finish_loading()
    return packed


def seconds_of(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> float:
    """Processor seconds of a pass through all products, divided by their number."""
    started = time.thread_time()
    for multiply in products:
        multiply(x)
    return (time.thread_time() - started) / len(products)


def best_ratio(
    ours: Sequence[Callable[[Tensor], Tensor]],
    theirs: Sequence[Callable[[Tensor], Tensor]],
    x: Tensor,
    rounds: int,
) -> float:
    """The best time of theirs divided by the best of ours. They take turns, and the first turn does not count."""
    seconds_of(ours, x)
    seconds_of(theirs, x)
    our_times = []
    their_times = []
    for _ in range(rounds):
        our_times.append(seconds_of(ours, x))
        their_times.append(seconds_of(theirs, x))
    return min(their_times) / min(our_times)


def bfloat16_product(out_features: int, in_features: int) -> Callable[[Tensor], Tensor]:
    """oneDNN's product with a random weight, as the engine's layers call it."""
    weight = torch.randn(out_features, in_features, dtype=torch.bfloat16)
    packed = pack_weight(nn.Parameter(weight, requires_grad=False))
    return lambda x: linear(x, packed)


def ratios_of(
    kind: Kind, out_features: int, in_features: int, all_rows: Sequence[int], rounds: int
) -> list[float]:
    """The best_ratio for each number of rows."""
    layer_kernels = CpuBackend(torch.device("cpu")).layer_kernels
    assert layer_kernels is not None
    kernels = layer_kernels.packed
    assert kernels is not None
    packed = [make_packed(kind, out_features, in_features, kernels) for _ in range(NUM_WEIGHTS)]
    ours = [partial(product_of, bias=None) for product_of in packed]
    theirs = [bfloat16_product(out_features, in_features) for _ in range(NUM_WEIGHTS)]
    ratios = []
    for rows in all_rows:
        x = torch.randn(rows, in_features, dtype=torch.bfloat16)
        ratios.append(best_ratio(ours, theirs, x, rounds))
    return ratios


def main() -> None:
    """Measure each size and kind; print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 512])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print_machine()
    table = []
    try:
        for (out_features, in_features), name in product(SIZES, options.kinds):
            ratios = ratios_of(KINDS[name], out_features, in_features, options.rows, options.rounds)
            size = f"{out_features} × {in_features}, {name}"
            table.append([size, *(f"{ratio:.2f}" for ratio in ratios)])
    except NotPackedError as error:
        sys.exit(str(error))
    print_table(["out × in, weights", *(f"{rows:,} rows" for rows in options.rows)], table)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
