"""Where rows are scored: seconds of whole runs with and without what makes them fast, in turns.

    python -m ops.bench.gpu.scoring --json scoring.json

One engine on Qwen3-0.6B's shape takes each shape with its graphs for steps with prompts, and with these left out. With
a long common prefix it also takes it where each row reads that for itself. The shapes: rows behind common tokens, and
256 sequences of which one wants log probabilities or follows a grammar.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.run.forward.mixed_graphs import MixedGraphs
from ops.bench.gpu.simulated import graphs_on_cpu
from ops.bench.make import SHAPES, existing_checkpoint
from ops.bench.report import print_machine, print_table, spread

PROMPT_TOKENS = 10_000  # prompts take ids below this, or the vocabulary's where it is smaller
WITH, WITHOUT, NO_SHARING = "graphs for prompts", "without", "each row reads the prefix"


@dataclass(frozen=True)
class RowShape:
    """Rows of one kind.

    shared: tokens that all prompts begin with. prompt, answer: the least and the most tokens of a row's own.
    first: parameters of the first row alone. has_long_prefix: it also runs where each row reads the prefix for itself.
    """

    name: str
    num_rows: int
    shared: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    first: dict[str, Any]
    has_long_prefix: bool = False


ROW_SHAPES = (
    RowShape(
        "2,000 rows behind 896 tokens, answers of 8 to 32",
        2000,
        896,
        (20, 80),
        (8, 32),
        {},
        has_long_prefix=True,
    ),
    RowShape(
        "2,000 rows behind 896 tokens, answers of 1 to 4",
        2000,
        896,
        (20, 80),
        (1, 4),
        {},
        has_long_prefix=True,
    ),
    RowShape(
        "256 rows behind 2,048 tokens", 256, 2048, (20, 80), (64, 128), {}, has_long_prefix=True
    ),
    RowShape("2,000 prompts of 300 to 500, answers of 4 to 16", 2000, 0, (300, 500), (4, 16), {}),
    RowShape("256 sequences", 256, 0, (100, 300), (100, 300), {}),
    RowShape("256, one with log probabilities", 256, 0, (100, 300), (100, 300), {"logprobs": 5}),
    RowShape(
        "256, one with a grammar",
        256,
        0,
        (100, 300),
        (100, 300),
        {"structured_outputs": {"regex": "[a-z ]{2000}"}},
    ),
)


def small(shape: RowShape) -> RowShape:
    """The shape with a few short rows, for a dry run."""
    return replace(shape, num_rows=4, shared=min(shape.shared, 16), prompt=(3, 9), answer=(2, 4))


def make_rows(
    shape: RowShape, vocab_size: int, turn: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and their parameters. Prompts of two turns share no beginning."""
    rng = random.Random(turn)
    most = min(PROMPT_TOKENS, vocab_size - 1)
    shared = [rng.randrange(5, most) for _ in range(shape.shared)]
    prompts = []
    params = []
    for row in range(shape.num_rows):
        own = [rng.randrange(5, most) for _ in range(rng.randint(*shape.prompt))]
        prompts.append(shared + own)
        first = shape.first if row == 0 else {}
        length = rng.randint(*shape.answer)
        params.append(
            SamplingParams(max_tokens=length, temperature=0.6, ignore_eos=not first, **first)
        )
    return prompts, params


def time_rows(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> float:
    """Seconds in which the engine answers all rows."""
    started = time.perf_counter()
    engine.generate(prompts, list(params))
    return time.perf_counter() - started


def variants_of(shape: RowShape) -> list[str]:
    """The variants in which a shape runs."""
    return [WITH, WITHOUT] + [NO_SHARING] * shape.has_long_prefix


def run_turns(
    engine: Engine, shapes: Sequence[RowShape], vocab_size: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Each shape in its variants, in turns; yield a record for each run."""
    runner: Any = engine._open_runner()
    mixed_graphs: MixedGraphs | None = runner._mixed_graphs
    static_rows = runner._graphs._static
    limits = runner.backend.prefix_limits
    tile_limits = getattr(runner.backend, "tile_limits", None)
    turn = 0
    for number in range(rounds):
        for shape in shapes:
            for variant in variants_of(shape):
                runner._mixed_graphs = None if variant == WITHOUT else mixed_graphs
                shares = variant != NO_SHARING
                runner.backend.prefix_limits = static_rows.limits = limits if shares else None
                runner.backend.tile_limits = tile_limits if shares else None
                static_rows.has_prefixes = False  # until a step of this variant finds one
                turn += 1
                prompts, params = make_rows(shape, vocab_size, turn)
                before = engine.stats().num_steps
                seconds = time_rows(engine, prompts, params)
                yield {
                    "shape": shape.name,
                    "variant": variant,
                    "round": number,
                    "seconds": seconds,
                    "steps": engine.stats().num_steps - before,
                    "rows_s": shape.num_rows / seconds,
                }


def print_results(records: Sequence[dict[str, Any]]) -> None:
    """A row for each shape; ratios are within rounds."""
    rows = []
    for shape in dict.fromkeys(record["shape"] for record in records):
        seconds: dict[str, dict[int, float]] = {WITH: {}, WITHOUT: {}, NO_SHARING: {}}
        for record in records:
            if record["shape"] == shape:
                seconds[record["variant"]][record["round"]] = record["seconds"]
        ratios = {
            variant: [each / seconds[WITH][i] for i, each in seconds[variant].items()]
            for variant in (WITHOUT, NO_SHARING)
        }
        steps = statistics.median(each["steps"] for each in records if each["shape"] == shape)
        rows.append(
            [
                shape,
                spread(list(seconds[WITH].values())),
                spread(list(seconds[WITHOUT].values())),
                spread(ratios[WITHOUT]),
                spread(ratios[NO_SHARING]) if ratios[NO_SHARING] else "",
                f"{steps:.0f}",
            ]
        )
    header = ["", f"seconds, {WITH}", f"seconds, {WITHOUT}", "ratio"]
    print_table([*header, f"ratio, {NO_SHARING}", "steps"], rows)


def main() -> None:
    """Run the shapes in turns; print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="where its checkpoint is, or is to be left")
    parser.add_argument("--json", type=Path, help="written anew after each run")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on a CPU")
    options = parser.parse_args()
    name, dtype = ("tiny", torch.float32) if options.dry_run else ("q06b", torch.bfloat16)
    settings: dict[str, Any] = {
        "device": "cuda",
        "attention_backend": "triton",
        "max_model_len": 4096,
        "kernel_check": "refuse",  # "warn" would replace a faulty kernel by torch's attention, and measure that
    }
    shapes: Sequence[RowShape] = ROW_SHAPES
    if options.dry_run:
        settings = {"device": "cpu", "attention_backend": "torch", "max_model_len": 64}
        settings |= {"kv_cache_bytes": 2**20, "max_num_batched_tokens": 300}
        shapes = [small(shape) for shape in ROW_SHAPES]
        options.rounds = 1
    print_machine()
    records: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        graphs_on_cpu(wanted=options.dry_run, with_prompts=True),
    ):
        model = existing_checkpoint(options.model or Path(folder) / "model", name, dtype)
        with Engine(EngineConfig(str(model), **settings)) as engine:
            for record in run_turns(engine, shapes, SHAPES[name].vocab_size, options.rounds):
                records.append(record)
                print(json.dumps(record), flush=True)
                if options.json:
                    options.json.write_text(json.dumps({"scoring": records}))
    print_results(records)


if __name__ == "__main__":
    main()
