"""256 sequences at once on Qwen3-0.6B's shape, as nano-vLLM's benchmark runs them, beside their floor.

    python -m ops.bench.throughput --json throughput.json

Prompts and answers of 100 to 1,024 tokens, random weights in bfloat16. Engines with and without CUDA graphs,
with and without overlap of scheduling and computing, take turns, each new in its turn. They sample at
temperature 0.6, as nano-vLLM's does, greedily, and with top_p.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from engine import Engine, EngineConfig
from ops.bench.engine import generate
from ops.bench.floor import Floor, floor_of, measure_ceilings
from ops.bench.gpu.simulated import graphs_on_cpu
from ops.bench.make import SHAPES, WORKLOADS, existing_checkpoint
from ops.bench.report import print_machine, print_table, spread
from ops.bench.workload import Workload

SAMPLING: dict[str, dict[str, Any]] = {
    "temperature 0.6": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "temperature 0.6, top_p 0.95": {"temperature": 0.6, "top_p": 0.95},
}
DEFAULT = "graphs, overlap"
VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULT: {"enforce_eager": False, "async_scheduling": True},
    "eager, overlap": {"enforce_eager": True, "async_scheduling": True},
    "graphs": {"enforce_eager": False, "async_scheduling": False},
    "eager": {"enforce_eager": True, "async_scheduling": False},
}
FP8 = "FP8 KV cache"
VARIANTS[FP8] = {**VARIANTS[DEFAULT], "kv_cache_dtype": "fp8_e4m3"}
Record = dict[str, Any]


def small(workload: Workload, num_seqs: int, shortened: int, vocab_size: int) -> Workload:
    """A workload like the given one for a dry run: fewer sequences, lengths divided by `shortened`."""
    prompts = [
        [token % vocab_size for token in prompt[: max(1, len(prompt) // shortened)]]
        for prompt in workload.prompts[:num_seqs]
    ]
    return replace(
        workload,
        prompts=prompts,
        lengths=[max(2, n // shortened) for n in workload.lengths[:num_seqs]],
    )


def with_other_tokens(workload: Workload, turn: int, vocab_size: int) -> list[list[int]]:
    """Prompts of the same lengths that share no block with those of another turn."""
    return [
        [(token + 101 * turn + 1) % vocab_size for token in prompt] for prompt in workload.prompts
    ]


def time_run(engine: Engine, prompts: list[list[int]], lengths: list[int], sampling: str) -> Record:
    """Seconds, output tokens per second, and what the engine counted."""
    before = engine.stats()
    started = time.perf_counter()
    outputs = generate(engine, prompts, lengths, **SAMPLING[sampling])
    wall_s = time.perf_counter() - started
    after = engine.stats()
    assert [len(tokens) for tokens in outputs] == lengths, "a sequence ended early"
    steps = after.num_steps - before.num_steps
    return {
        "sampling": sampling,
        "wall_s": wall_s,
        "tok_s": sum(lengths) / wall_s,
        "steps": steps,
        "ms_per_step": 1000 * wall_s / steps,
        "preemptions": after.num_preemptions - before.num_preemptions,
        "cached_tokens": after.cached_tokens - before.cached_tokens,
    }


def run_variant(
    name: str,
    model: Path,
    workload: Workload,
    turn: int,
    ways: Sequence[str],
    warms_alone: bool = False,
    **settings: Any,
) -> Iterator[Record]:
    """Start an engine, warm it up, and run the workload with each of these ways of sampling.

    warms_alone: do not run it; what is launched is compiled then, for who comes next.
    """
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    limit = min(10_000, vocab_size - 1)
    config = EngineConfig(
        str(model), max_num_seqs=len(workload.prompts), **VARIANTS[name], **settings
    )
    started = time.perf_counter()
    with Engine(config) as engine:
        start_s = time.perf_counter() - started
        few = with_other_tokens(workload, 1000 + turn, limit)[:8]
        for sampling in ways:
            generate(engine, few, [2] * len(few), **SAMPLING[sampling])
        print(
            f"{name}: ready after {time.perf_counter() - started:.1f} s, {start_s:.1f} s of it to start"
        )
        for i, sampling in enumerate(() if warms_alone else ways):
            prompts = with_other_tokens(workload, len(ways) * turn + i, limit)
            found = time_run(engine, prompts, workload.lengths, sampling)
            yield {"variant": name, "turn": turn, "start_s": start_s, **found}
    del engine
    gc.collect()  # the engine's pool must be free before the next one measures what is
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def print_results(records: list[Record], floor: Floor) -> None:
    """A row for each variant and way of sampling; ratios to the default are within turns."""
    default = {(r["turn"], r["sampling"]): r["tok_s"] for r in records if r["variant"] == DEFAULT}
    rows = []
    for name, sampling in dict.fromkeys(map(_kind, records)):
        own = [r for r in records if _kind(r) == (name, sampling)]
        ratios = [
            r["tok_s"] / default[turn, sampling]
            for r in own
            if (turn := r["turn"], sampling) in default
        ]
        rows.append(
            [
                f"{name}, {sampling}",
                spread([r["tok_s"] for r in own], 0),
                f"{statistics.median(floor.seconds / r['wall_s'] for r in own):.1%}",
                spread(ratios) if ratios else "-",
                f"{statistics.median(r['ms_per_step'] for r in own):.2f}",
                str(sum(r["preemptions"] for r in own)),
                f"{statistics.median(r['start_s'] for r in own):.1f}",
            ]
        )
    header = ["", "output tok/s", "of the floor", "÷ default", "ms/step", "preemptions", "start, s"]
    print_table(header, rows)


def _kind(record: Record) -> tuple[str, str]:
    return record["variant"], record["sampling"]


def parse_options() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no new engine after this time"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--sampling", nargs="+", choices=SAMPLING, default=list(SAMPLING))
    parser.add_argument(
        "--warm-up-alone", action="store_true", help="compile what each variant launches"
    )
    parser.add_argument(
        "--model", type=Path, help="where its checkpoint is, or is to be made and left"
    )
    parser.add_argument("--json", type=Path, help="written anew after each run")
    parser.add_argument(
        "--dry-run", action="store_true", help="a tiny model and a few sequences, on a CPU"
    )
    return parser.parse_args()


def run_turns(
    options: argparse.Namespace, model: Path, workload: Workload, settings: dict[str, Any]
) -> Iterator[Record]:
    """Let the variants take turns until the rounds or the seconds are used up."""
    started = time.monotonic()
    for turn in range(1 if options.warm_up_alone else options.rounds):
        for variant in options.variants:
            if time.monotonic() - started > options.seconds:
                print(f"the time is up: {options.rounds} rounds were meant")
                return
            yield from run_variant(
                variant, model, workload, turn, options.sampling, options.warm_up_alone, **settings
            )


def main() -> None:
    """Run the variants in turns; print a table."""
    options = parse_options()
    device = torch.device("cpu" if options.dry_run else "cuda")
    name, dtype = ("tiny", torch.float32) if options.dry_run else ("q06b", torch.bfloat16)
    shape, workload = SHAPES[name], WORKLOADS["mixed256"]
    settings: dict[str, Any] = {
        "device": device.type,
        "attention_backend": "triton",
        "max_model_len": 4096,
        "kernel_check": "refuse",  # "warn" would replace a faulty kernel by torch's attention, and measure that
    }
    if options.dry_run:
        workload = small(workload, 2, 400, shape.vocab_size)
        settings |= {"max_model_len": 64, "kv_cache_bytes": 2**20}
    print_machine()
    ceilings = measure_ceilings(device, dtype)
    floor = floor_of(workload, shape, ceilings, dtype.itemsize)
    num_tokens = sum(workload.lengths)
    print(f"{workload}; {ceilings}")
    print(
        f"floor {floor.seconds:.2f} s, {num_tokens / floor.seconds:,.0f} tok/s: {floor}", flush=True
    )
    found = {"ceilings": asdict(ceilings), "floor_s": floor.seconds, "out_tokens": num_tokens}
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder, graphs_on_cpu(wanted=options.dry_run):
        model = existing_checkpoint(options.model or Path(folder) / "model", name, dtype)
        for record in run_turns(options, model, workload, settings):
            records.append(record)
            shown = {key: record[key] for key in ("variant", "sampling", "turn", "tok_s")}
            print(json.dumps(shown), flush=True)
            if options.json:
                options.json.write_text(json.dumps({**found, "runs": records}))
    print_results(records, floor)


if __name__ == "__main__":
    main()
