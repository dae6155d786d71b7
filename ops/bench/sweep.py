"""Decode attention with other tiles, stages, warps, splits and numbers of programs than the engine takes.

    python -m ops.bench.sweep --json sweep.json

Each batch starts from what the engine takes: tiles and stages are tried together, then warps, lengths of
splits and programs, the best kept each time, so that a score of variants is compiled and not a thousand.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from engine.attention.triton_backend import TritonBackend
from engine.kernels import decode_attention as module
from ops.bench.floor import measure_ceilings, seconds_of
from ops.bench.kernels import Paged, contexts, make_paged
from ops.bench.make import SHAPES
from ops.bench.report import print_machine
from ops.bench.table import print_table

BATCHES = ((256, 150, 1536), (64, 150, 1536), (256, 512, 512), (16, 4096, 4096))  # sequences, contexts
VALUES: dict[str, tuple[int, ...]] = {
    "tile": (16, 32, 64), "stages": (2, 3, 4, 5, 6), "warps": (2, 4, 8), "split": (256, 512, 1024, 2048),
    "programs": (1, 2, 4, 8, 16),
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """tile, split: tokens.  stages: of the loop over tiles.  warps: of a program.
    programs: that share the splits of a sequence and KV head."""

    tile: int
    stages: int
    warps: int
    split: int
    programs: int


@dataclass(frozen=True)
class Tried:
    """A choice's seconds, None where it does not fit into a multiprocessor."""

    batch: str
    choice: Choice
    seconds: float | None


class Relaunched:
    """Stands in for a kernel: notes what it is launched with, and changes some of that."""

    def __init__(self, kernel: Any, changes: dict[str, Any]) -> None:
        self._kernel, self._changes = kernel, changes
        self.given: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.given = kwargs
            self._kernel[grid](*args, **kwargs | {k: v for k, v in self._changes.items() if k in kwargs})

        return launch


@contextmanager
def relaunched(**changes: Any) -> Iterator[Relaunched]:
    """Within it decode attention's kernel gets these arguments instead of its own."""
    kernel = module.decode_kernel
    module.decode_kernel = Relaunched(kernel, changes)
    try:
        yield module.decode_kernel
    finally:
        module.decode_kernel = kernel


class Sweep:
    """One batch, and what was tried on it."""

    def __init__(self, name: str, paged: Paged, device: torch.device) -> None:
        self.name, self._paged, self._device = name, paged, device
        self.tried: list[Tried] = []
        self._metadata = TritonBackend(device).build_metadata(
            paged.tables, paged.context_lens, paged.query_lens
        )
        num_pairs = len(paged.query) * paged.cache.keys.shape[2]
        self._programs = module.choose_num_programs(num_pairs, 132)
        self._arrived = torch.zeros(num_pairs, dtype=torch.int32, device=device)

    def engines(self) -> Choice:
        """What the engine takes."""
        with relaunched() as kernel:
            self._attend(module.SPLIT_TOKENS, self._programs)
        given = kernel.given
        return Choice(given["TILE"], given["num_stages"], given["num_warps"], given["SPLIT"], self._programs)

    def best(self, choices: Iterable[Choice], keep: Callable[[], None]) -> Choice:
        """Time those that were not timed yet; the fastest of all choices."""
        for choice in choices:
            if choice not in [each.choice for each in self.tried]:
                self.tried.append(Tried(self.name, choice, self._seconds(choice)))
                keep()
        timed = {each.choice: each.seconds for each in self.tried if each.seconds is not None}
        return min(timed, key=timed.__getitem__)

    def _seconds(self, choice: Choice) -> float | None:
        changes = {"TILE": choice.tile, "num_stages": choice.stages, "num_warps": choice.warps}
        with relaunched(**changes):
            try:
                self._attend(choice.split, choice.programs)
            except OutOfResources:
                return None
            if self._device.type != "cuda":
                return seconds_of(
                    lambda: self._attend(choice.split, choice.programs), self._device, repeats=1
                )
            from triton.testing import do_bench

            median = do_bench(
                lambda: self._attend(choice.split, choice.programs), warmup=10, rep=40, return_mode="median"
            )
            return float(median) / 1000

    def _attend(self, split: int, programs: int) -> None:
        paged = self._paged
        module.decode_attention(
            paged.query, paged.cache.keys, paged.cache.values, self._metadata.decode,  # type: ignore[attr-defined]
            self._arrived, torch.empty_like(paged.query), scale=paged.features.scale, num_programs=programs,
            split_tokens=split,
        )  # fmt: skip


def main() -> None:
    """Sweep each batch until the seconds are used up; print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1e9, help="try no new batch after this time")
    parser.add_argument("--json", type=Path, help="written anew after each choice")
    parser.add_argument("--dry-run", action="store_true", help="tiny, in Triton's interpreter")
    options = parser.parse_args()
    started = time.monotonic()
    device = torch.device("cpu" if options.dry_run else "cuda")
    dtype = torch.float32 if options.dry_run else torch.bfloat16
    batches: tuple[tuple[int, int, int], ...] = BATCHES
    shape, values = SHAPES["q06b"], VALUES
    if options.dry_run:
        shape = SHAPES["tiny"]
        values = {"tile": (16, 32), "stages": (3,), "warps": (4,), "split": (256,), "programs": (1, 2)}
        batches = ((2, 20, 40),)
    print_machine()
    bandwidth = measure_ceilings(device, dtype).read_bandwidth
    tried: dict[str, list[Tried]] = {}

    def keep() -> None:
        if options.json:
            rows = [asdict(each) for own in tried.values() for each in own]
            options.json.write_text(json.dumps(rows))

    for num_seqs, low, high in batches:
        if time.monotonic() - started > options.seconds:
            print("the time is up: not all batches were tried")
            break
        name = f"{num_seqs} sequences, contexts {low:,} to {high:,}"
        paged = make_paged(shape, contexts(num_seqs, low, high), [1] * num_seqs, device, dtype)
        with torch.inference_mode():
            sweep = Sweep(name, paged, device)
            tried[name] = sweep.tried
            best = engines = sweep.engines()
            grid = product(values["tile"], values["stages"])
            best = sweep.best([best, *(replace(best, tile=t, stages=s) for t, s in grid)], keep)
            best = sweep.best([replace(best, warps=each) for each in values["warps"]], keep)
            best = sweep.best([replace(best, split=each) for each in values["split"]], keep)
            best = sweep.best([replace(best, programs=each) for each in values["programs"]], keep)
        print_table(
            [name, "µs", "of read bandwidth"],
            [
                [
                    f"{each.choice}{', the engine' if each.choice == engines else ''}",
                    f"{1e6 * each.seconds:,.1f}" if each.seconds else "does not fit",
                    f"{paged.num_bytes / each.seconds / bandwidth:.0%}" if each.seconds else "-",
                ]
                for each in sorted(sweep.tried, key=lambda each: each.seconds or 1e9)
            ],
        )


if __name__ == "__main__":
    main()
