"""What the device does in decode steps and in the whole 256-sequence run, by kernel, and its idle share.

    python -m ops.bench.step_profile --json profile.json

torch's profiler watches 20 steps of the default engine at each number of sequences, contexts as they are half
way through the run, and then the run itself, cut where all prompts are in the cache. In a dry run it watches
a CPU's operations, each with what it calls, and no kernel of Triton's shows.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engine import Engine, EngineConfig, SamplingParams
from ops.bench.estimate import PART_S, TEMPERATURE_06, TOK_S, beside
from ops.bench.make import SHAPES, existing_checkpoint, mixed_256
from ops.bench.report import print_machine
from ops.bench.simulated import graphs_on_cpu
from ops.bench.table import print_table
from ops.bench.throughput import small, with_other_tokens
from ops.bench.workload import Workload

STEPS = 20
BATCHES = (256, 128, 32)
WARM_STEPS = 5
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|splitK|::mm$|::addmm$|product", re.IGNORECASE)
HEAD_TIMES = 5  # the LM head reads 25 times the weights of a layer's largest product
#: Beginnings of kernels' names, by the part of the estimate they belong to; what is in none of them is glue.
PARTS = {
    "sampler": ("tile_maxima_kernel", "choose_token_kernel", "edit_kernel"),
    "attention": ("decode_kernel", "prefill_kernel"),
    "merge": (),  # a part of decode_kernel, where the estimate has a launch of its own for it
    "layers": (
        "project_heads_kernel",
        "rms_norm_kernel",
        "norm_rotate_store_kernel",
        "store_kernel",
        "gate_and_mul_kernel",
        "choose_kernel",
        "group_kernel",
    ),
    "glue": ("advance_kernel", "write_rows_kernel", "fill_pending_kernel"),
}
#: What sampling by torch's operations becomes on a GPU; but its gather is what embeddings are looked up by.
SAMPLER = re.compile(r"sample|argmax|softmax|cumsum|scan|searchsorted|sort|topk|exp_kernel", re.IGNORECASE)
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

    def by_part(self) -> dict[str, float]:
        """Seconds of each part of the estimate, prefill aside."""
        found = dict.fromkeys((name for name in PART_S if name != "prefill"), 0.0)
        products = [end - start for name, start, end in self.spans if part_of(name) == "product"]
        limit = HEAD_TIMES * statistics.median(products) if products else 0.0
        for name, start, end in self.spans:
            part = part_of(name)
            if part == "product":
                part = "head" if end - start > limit else "layers"
            found[part] += end - start
        return found


@cache
def part_of(name: str) -> str:
    """The part of the estimate that a kernel belongs to; "product" for layers' products and the head's."""
    for part, beginnings in PARTS.items():
        if name.startswith(beginnings):
            return part
    if PRODUCT.search(name):
        return "product"
    return "sampler" if SAMPLER.search(name) else "glue"


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


def add(engine: Engine, prompts: Sequence[Sequence[int]], lengths: Sequence[int], label: str) -> list[str]:
    """Give the engine requests at temperature 0.6; return their ids."""
    ids = [f"{label} {i}" for i in range(len(prompts))]
    for request_id, prompt, length in zip(ids, prompts, lengths, strict=True):
        params = SamplingParams(max_tokens=length, temperature=0.6, ignore_eos=True)
        engine.add(request_id, list(prompt), params)
    return ids


def prefill(engine: Engine, num_tokens: int) -> None:
    """Step until so many tokens of prompts more are in the cache."""

    def cached() -> int:
        stats = engine.stats()
        return stats.prefill_tokens + stats.cached_tokens

    wanted = cached() + num_tokens
    while cached() < wanted:
        engine.step()


def profile_steps(engine: Engine, prompts: Sequence[Sequence[int]], device: torch.device) -> Profile:
    """STEPS steps in which all of these sequences decode."""
    length = 2 * WARM_STEPS + STEPS + len(prompts)  # none ends before: a step takes in one prompt at least
    ids = add(engine, prompts, [length] * len(prompts), f"{len(prompts)} sequences")
    prefill(engine, sum(map(len, prompts)))
    for _ in range(WARM_STEPS):
        engine.step()
    with profiled(device) as found:
        for _ in range(STEPS):
            engine.step()
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_unfinished:
        engine.step()
    return found


def profile_run(engine: Engine, workload: Workload, device: torch.device) -> tuple[Profile, Profile]:
    """The whole run: until all prompts are in the cache, and from there on."""
    add(engine, workload.prompts, workload.lengths, "run")
    with profiled(device) as first:
        prefill(engine, sum(map(len, workload.prompts)))
    with profiled(device) as rest:
        while engine.has_unfinished:
            engine.step()
    return first, rest


def half_way(workload: Workload, num_seqs: int) -> list[list[int]]:
    """Prompts as long as the contexts of the run's sequences are when half of their answers are there."""
    found = []
    for prompt, length in list(zip(workload.prompts, workload.lengths, strict=True))[:num_seqs]:
        longer = len(prompt) + length // 2
        found.append((prompt * -(-longer // len(prompt)))[:longer])
    return found


def print_steps(num_seqs: int, found: Profile) -> dict[str, Any]:
    """Print the kernels that take most; return what to keep."""
    rows: list[dict[str, Any]] = [
        {"kernel": name, "us_per_step": 1e6 * sum(times) / STEPS, "calls_per_step": len(times) / STEPS}
        for name, times in found.by_kernel().items()
    ]
    print(
        f"\n{num_seqs} sequences: {1000 * found.wall_s / STEPS:.2f} ms a step, the device idle for "
        f"{found.idle_share:.1%}, {len(found.spans) / STEPS:.1f} kernels and copies a step",
        flush=True,
    )
    print_table(
        ["kernel", "µs a step", "calls a step"],
        [[r["kernel"][:70], f"{r['us_per_step']:,.1f}", f"{r['calls_per_step']:.1f}"] for r in rows[:SHOWN]],
    )
    return {
        "ms_per_step": 1000 * found.wall_s / STEPS, "idle_share": found.idle_share, "kernels": rows,
        "parts_ms": {part: 1000 * s / STEPS for part, s in found.by_part().items()},
    }  # fmt: skip


def print_run(first: Profile, rest: Profile, num_tokens: int) -> dict[str, Any]:
    """Print the run's parts beside the estimate; return what to keep."""
    parts = {**rest.by_part(), "prefill": first.busy_s}
    wall_s = first.wall_s + rest.wall_s
    tok_s = beside(num_tokens / wall_s, TOK_S[TEMPERATURE_06], "tok/s", 0)
    print(f"\nthe run, watched: {wall_s:.2f} s, {tok_s}")
    print(f"idle while prompts are computed {first.idle_share:.1%}, while all decode {rest.idle_share:.1%}")
    for part, estimated in PART_S.items():
        print(f"{part}: {beside(parts[part], estimated, 's')}")
    kernels = {name: sum(times) for name, times in rest.by_kernel().items()}
    return {"wall_s": wall_s, "parts_s": parts, "idle_share": rest.idle_share, "kernels_s": kernels}


def main() -> None:
    """Profile the steps, then the run; what was found is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, help="where its checkpoint is, or is to be made and left")
    parser.add_argument("--json", type=Path, help="written anew after each")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model and a few sequences, on a CPU")
    options = parser.parse_args()
    device = torch.device("cpu" if options.dry_run else "cuda")
    name, dtype = ("tiny", torch.float32) if options.dry_run else ("q06b", torch.bfloat16)
    shape, workload = SHAPES[name], mixed_256()
    batches: tuple[int, ...] = BATCHES
    settings: dict[str, Any] = {"max_model_len": 4096}
    if options.dry_run:
        workload, batches = small(workload, 3, 200, shape.vocab_size), (3, 1)
        settings = {"max_model_len": 64, "kv_cache_bytes": 2**20}
    print_machine()
    found: dict[str, Any] = {"steps": {}}

    def keep() -> None:
        if options.json:
            options.json.write_text(json.dumps(found))

    with tempfile.TemporaryDirectory() as folder, graphs_on_cpu(wanted=options.dry_run):
        model = existing_checkpoint(options.model or Path(folder) / "model", shape, dtype)
        config = EngineConfig(
            str(model), device=device.type, attention_backend="triton", max_num_seqs=len(workload.prompts),
            async_scheduling=True, **settings,
        )  # fmt: skip
        with Engine(config) as engine:
            for num_seqs in batches:
                steps = profile_steps(engine, half_way(workload, num_seqs), device)
                found["steps"][str(num_seqs)] = print_steps(num_seqs, steps)
                keep()
            # other tokens than before, of which none is cached
            prompts = with_other_tokens(workload, 1, min(10_000, shape.vocab_size - 1))
            first, rest = profile_run(engine, replace(workload, prompts=prompts), device)
            found["run"] = print_run(first, rest, sum(workload.lengths))
            keep()


if __name__ == "__main__":
    main()
