"""A kernel's time beside the least it can take: its bytes over the copy bandwidth, or its operations."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ops.bench.floor import Ceilings, seconds_of
from ops.bench.report import print_table


@dataclass(frozen=True)
class Case:
    """One call of a kernel. num_bytes: read and written.  flops: of matrix products, 0 where it has none."""

    name: str
    run: Callable[[], object]
    num_bytes: int
    flops: int = 0

    def floor_s(self, ceilings: Ceilings) -> float:
        """The larger of its two least times."""
        return max(self.num_bytes / ceilings.bandwidth, self.flops / ceilings.flops)


@dataclass(frozen=True)
class Found:
    """A case's seconds beside its floor; bytes per second of what it must move."""

    name: str
    seconds: float
    floor_s: float
    bandwidth: float


def time_case(case: Case, ceilings: Ceilings, device: torch.device) -> Found:
    """Time one case. On a GPU the caches are flushed before each run, and the median of many is taken.

    It is recorded there and replayed, as in a decode step: Python's launch takes longer than most kernels.
    """
    if device.type == "cuda":
        from triton.testing import do_bench

        case.run()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            case.run()
        seconds = do_bench(graph.replay, warmup=20, rep=100, return_mode="median") / 1000
    else:
        seconds = seconds_of(case.run, device, repeats=3)
    return Found(case.name, seconds, case.floor_s(ceilings), case.num_bytes / seconds)


def run_cases(
    cases: Iterable[Case], ceilings: Ceilings, device: torch.device, json_file: Path | None
) -> None:
    """Time each case, write what was found after each, and print a table."""
    found: list[Found] = []
    with torch.inference_mode():
        for case in cases:
            found.append(time_case(case, ceilings, device))
            if json_file:
                rows = [asdict(each) for each in found]
                json_file.write_text(json.dumps({"ceilings": asdict(ceilings), "kernels": rows}))
    print_table(
        ["one call", "µs", "floor, µs", "floor ÷ time", "GB/s", "of copy bandwidth"],
        [
            [
                each.name,
                f"{1e6 * each.seconds:,.1f}",
                f"{1e6 * each.floor_s:,.1f}",
                f"{each.floor_s / each.seconds:.0%}",
                f"{each.bandwidth / 1e9:,.0f}",
                f"{each.bandwidth / ceilings.bandwidth:.0%}",
            ]
            for each in found
        ],
    )
