"""Host time per decode step, with a model that computes nothing.

    python -m ops.bench.host_time

The engine itself runs: it schedules and builds the batch; only the runner is replaced, by
one that answers every row with the same token. Counted is the CPU time of the thread, so that other
processes on the machine disturb little.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.checkpoint.adapter_folder import Adapter
from engine.checkpoint.model_config import ModelConfig
from engine.run.forward.runner import PendingTokens, PoolSize, Sampled
from engine.run.forward.transfers import DeviceTokens
from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.step_batch import StepBatch
from ops.bench.report import print_machine, print_table, spread

MODEL = (
    Path(__file__).resolve().parents[1] / "demo" / "model"
)  # for its tokenizer; no weight is read
BLOCK_SIZE, TOKEN = 16, 11
TURNS = 5
STEPS = 2 * BLOCK_SIZE  # in each turn: two blocks for each sequence, whenever it needs them
CASES = "256x100", "256x500", "256x1000", "256x2000", "256x3000", "1024x100", "1024x1000"


class NullRunner:
    """Stands in for a ModelRunner: room for all sequences, and the same token for each row."""

    backend_name, has_graphs = "none", False

    def __init__(self, num_seqs: int, max_model_len: int) -> None:
        num_blocks = num_seqs * -(-max_model_len // BLOCK_SIZE)
        self.pool_size = PoolSize(num_blocks, 0, max_model_len)

    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        """One token for each row that samples."""
        num_samples = len(step.sample_rows)
        return DeviceTokens(Sampled(torch.full((num_samples,), TOKEN), np.arange(num_samples)))

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to free."""


def make_prompts(num_seqs: int, context: int) -> list[list[int]]:
    """Prompts of about `context` tokens, so spread that each step finds some of them at a block's end."""
    rng = random.Random(0)
    return [rng.choices(range(10, 500), k=context - i % BLOCK_SIZE) for i in range(num_seqs)]


def start_engine(prompts: list[list[int]], *, overlap: bool) -> Engine:
    """An engine in which all prompts are computed and run on.

    overlap: schedule each step while the one before runs. There is nothing to wait for here, so that what
    this mode's own books cost shows in full.
    """
    max_len = max(map(len, prompts)) + (TURNS + 2) * STEPS + BLOCK_SIZE
    runner = NullRunner(len(prompts), max_len)

    def start_runner(config: EngineConfig, model: ModelConfig, folder: Path) -> NullRunner:
        return runner

    config = EngineConfig(
        str(MODEL),
        max_num_seqs=len(prompts),
        max_num_batched_tokens=sum(
            map(len, prompts)
        ),  # all prompts at once: then every step decodes all
        block_size=BLOCK_SIZE,
        async_scheduling=overlap,
    )
    engine = Engine(config, start_runner=start_runner)
    engine._stepper.drafts = None  # the same token again and again would be guessed
    params = SamplingParams(max_tokens=max_len, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, params)
    while engine.stats().decode_tokens < len(prompts):
        engine.step()
    return engine


def median_ms(step: Callable[[], object], num_steps: int) -> float:
    """Median milliseconds of a step over num_steps of them, of this thread's CPU time: nothing here waits."""
    times = []
    for _ in range(num_steps):
        started = time.thread_time()
        step()
        times.append(time.thread_time() - started)
    return 1000 * statistics.median(times)


def measure(num_seqs: int, context: int) -> dict[str, list[float]]:
    """Median milliseconds per step of each turn, without overlap and with it, in turns."""
    prompts = make_prompts(num_seqs, context)
    with (
        start_engine(prompts, overlap=False) as plain,
        start_engine(prompts, overlap=True) as overlapping,
    ):
        engines = {"engine": plain, "engine, overlap": overlapping}
        times: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(TURNS + 1):
            for name, engine in engines.items():
                took = median_ms(engine.step, STEPS)
                if turn:  # the first warms up
                    times[name].append(took)
                assert engine.stats().num_running == num_seqs
    return times


def main() -> None:
    """Measure all cases; print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=CASES, help="sequences x context")
    cases = [tuple(map(int, case.split("x"))) for case in parser.parse_args().cases]
    torch.set_num_threads(1)
    print_machine()
    found = {case: measure(*case) for case in cases}
    print_table(
        ["CPU ms per decode step: median (least..most)", *next(iter(found.values()))],
        [
            [f"{num_seqs} sequences, context {context:,}", *map(spread, times.values())]
            for (num_seqs, context), times in found.items()
        ],
    )


if __name__ == "__main__":
    main()
