"""Each kernel's time beside the least it can take, in Qwen3-0.6B's sizes in bfloat16.

python -m ops.bench.kernels                  # needs a GPU
python -m ops.bench.kernels --only sampler
python -m ops.bench.kernels --only attention --flash-attention-3 _vllm_fa3_C.abi3.so
TRITON_INTERPRET=1 python -m ops.bench.kernels --dry-run   # tiny, in the interpreter
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from ops.bench.floor import measure_ceilings
from ops.bench.kernels import flash_attention_3
from ops.bench.kernels.paged import Peer, attention_cases, layer_cases
from ops.bench.kernels.products import product_cases, sampler_cases
from ops.bench.kernels.timing import Case, run_cases
from ops.bench.make import SHAPES, Shape
from ops.bench.report import print_machine

Make = Callable[[Shape, int, torch.device, torch.dtype], Iterator[Case]]

#: What makes a group's cases of so many rows, and of how many.
ROWS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "layers": (layer_cases, (256, 8192)),
    "products": (product_cases, (32, 128, 256)),
    "sampler": (sampler_cases, (32, 128, 256)),
}
GROUPS = ("attention", *ROWS)


def cases_of(
    group: str, device: torch.device, *, dry_run: bool, peer: Peer | None = None
) -> Iterator[Case]:
    """A group's cases, made one by one, as their tensors fill a device. peer: also runs the cases of attention."""
    shape, dtype = (SHAPES["tiny"], torch.float32) if dry_run else (SHAPES["q06b"], torch.bfloat16)
    if group == "attention":
        yield from attention_cases(shape, device, dtype, tiny=dry_run, peer=peer)
        return
    make, all_rows = ROWS[group]
    for rows in (2,) if dry_run else all_rows:
        yield from make(shape, rows, device, dtype)


def main() -> None:
    """Measure the ceilings and each case; print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--dry-run", action="store_true", help="tiny, in Triton's interpreter")
    parser.add_argument(
        "--flash-attention-3",
        type=Path,
        help="the file of its library; it also runs the cases of attention",
    )
    parser.add_argument("--json", type=Path, help="written anew after each case")
    options = parser.parse_args()
    device = torch.device("cpu" if options.dry_run else "cuda")
    print_machine()
    ceilings = measure_ceilings(device, torch.float32 if options.dry_run else torch.bfloat16)
    print(ceilings, flush=True)
    peer = None
    if options.flash_attention_3:
        attention = flash_attention_3.load_library(options.flash_attention_3)
        peer = Peer("FlashAttention 3", partial(flash_attention_3.bind, attention))
    groups = (cases_of(group, device, dry_run=options.dry_run, peer=peer) for group in options.only)
    run_cases(chain.from_iterable(groups), ceilings, device, options.json)


if __name__ == "__main__":
    main()
