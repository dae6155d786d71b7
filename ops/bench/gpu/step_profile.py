"""What the device does in the 256-sequence run, by kernel, and its idle share.

    python -m ops.bench.gpu.step_profile --json profile.json

torch's profiler watches the default engine until all prompts are in the cache, and from there on. In a dry
run it watches a CPU's operations, each with what it calls, and no kernel of Triton's shows.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engine import Engine, EngineConfig, SamplingParams
from ops.bench.engine import generate
from ops.bench.gpu.simulated import graphs_on_cpu
from ops.bench.make import SHAPES, WORKLOADS, existing_checkpoint
from ops.bench.report import print_machine, print_table
from ops.bench.throughput import small, with_other_tokens
from ops.bench.workload import Workload

SHOWN = 12


@dataclass
class Profile:
    """Spans of the device's work, in seconds: (kernel, start, end). wall_s: of the host, waiting included."""

    spans: list[tuple[str, float, float]] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which anything ran."""
        busy, until = 0.0, float("-inf")
        for _, start, end in sorted(self.spans, key=lambda span: span[1]):
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        return busy

    @property
    def idle_share(self) -> float:
        """Of the time from the first kernel's start to the last one's end."""
        if not self.spans:
            return 1.0
        span_s = max(end for _, _, end in self.spans) - min(start for _, start, _ in self.spans)
        return 1 - self.busy_s / span_s if span_s else 0.0

    def by_kernel(self) -> dict[str, list[float]]:
        """Seconds of each call, the kernels that take most first."""
        times: dict[str, list[float]] = defaultdict(list)
        for name, start, end in self.spans:
            times[name].append(end - start)
        return dict(sorted(times.items(), key=lambda item: -sum(item[1])))


@contextmanager
def profiled(device: torch.device) -> Iterator[Profile]:
    """Watch what is done within it, until the device is done with it."""
    on_gpu = device.type == "cuda"
    found = Profile()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as watched:
        started = time.perf_counter()
        yield found
        if on_gpu:
            torch.cuda.synchronize(device)
        found.wall_s = time.perf_counter() - started
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    for event in watched.profiler.kineto_results.events():
        if event.device_type() == kind:
            start_s = event.start_ns() / 1e9
            found.spans.append((event.name(), start_s, start_s + event.duration_ns() / 1e9))


def profile_run(engine: Engine, workload: Workload, device: torch.device) -> dict[str, Any]:
    """The run until all prompts are in the cache, and from there on."""
    for i, (prompt, length) in enumerate(zip(workload.prompts, workload.lengths, strict=True)):
        engine.add(
            str(i), prompt, SamplingParams(max_tokens=length, temperature=0.6, ignore_eos=True)
        )
    num_tokens = engine.stats().prefill_tokens + sum(map(len, workload.prompts))
    return {
        "prefill": _profile(
            "prefill", engine, device, lambda: engine.stats().prefill_tokens < num_tokens
        ),
        "decode": _profile("decode", engine, device, lambda: engine.has_unfinished),
    }


def _profile(
    part: str, engine: Engine, device: torch.device, goes_on: Callable[[], bool]
) -> dict[str, Any]:
    before = engine.stats().num_steps
    with profiled(device) as found:
        while goes_on():
            engine.step()
    return print_profile(part, found, engine.stats().num_steps - before)


def print_profile(title: str, found: Profile, steps: int) -> dict[str, Any]:
    """Print the kernels that take most, each per step; return what to keep."""
    ms_per_step = 1000 * found.wall_s / steps
    rows: list[dict[str, Any]] = [
        {
            "kernel": name,
            "us_per_step": 1e6 * sum(times) / steps,
            "calls_per_step": len(times) / steps,
        }
        for name, times in found.by_kernel().items()
    ]
    print(
        f"\n{title}: {ms_per_step:.2f} ms a step, the device idle for {found.idle_share:.1%}, "
        f"{len(found.spans) / steps:.1f} kernels and copies a step",
        flush=True,
    )
    print_table(
        ["kernel", "µs a step", "calls a step"],
        [
            [r["kernel"][:70], f"{r['us_per_step']:,.1f}", f"{r['calls_per_step']:.1f}"]
            for r in rows[:SHOWN]
        ],
    )
    return {"ms_per_step": ms_per_step, "idle_share": found.idle_share, "kernels": rows}


def main() -> None:
    """Warm the engine up, then profile the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="where its checkpoint is, or is to be made and left"
    )
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument(
        "--dry-run", action="store_true", help="a tiny model and a few sequences, on a CPU"
    )
    options = parser.parse_args()
    device = torch.device("cpu" if options.dry_run else "cuda")
    name, dtype = ("tiny", torch.float32) if options.dry_run else ("q06b", torch.bfloat16)
    vocab_size, workload = min(10_000, SHAPES[name].vocab_size - 1), WORKLOADS["mixed256"]
    settings: dict[str, Any] = {"max_model_len": 4096, "enable_prefix_caching": False}
    if options.dry_run:
        workload = small(workload, 3, 200, SHAPES[name].vocab_size)
        settings |= {"max_model_len": 64, "kv_cache_bytes": 2**20}
    print_machine()
    with tempfile.TemporaryDirectory() as folder, graphs_on_cpu(wanted=options.dry_run):
        model = existing_checkpoint(options.model or Path(folder) / "model", name, dtype)
        config = EngineConfig(
            str(model), device=device.type, attention_backend="triton", max_num_seqs=len(workload.prompts),
            async_scheduling=True, kernel_check="refuse", **settings,
        )  # fmt: skip
        with Engine(config) as engine:
            few = with_other_tokens(workload, 1, vocab_size)[:8]
            generate(engine, few, [2] * len(few), temperature=0.6)
            found = profile_run(engine, workload, device)
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
