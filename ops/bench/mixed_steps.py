"""How many steps of a drain are mixed, so that no graph serves them, with a model that computes nothing.

    python -m ops.bench.mixed_steps

More requests than slots, prompts and completions of 100 to 1024 tokens, all there at the start. Each drain
runs twice: with every place given away as it becomes free, and with the places of a backlog given together
(engine/schedule/admission.py), as where decode steps run from graphs. Counted are steps, so nothing of the
machine or its load is in it.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from engine import Engine, EngineConfig, SamplingParams
from engine.checkpoint.model_config import ModelConfig
from engine.run.pending_tokens import PendingTokens
from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.step_batch import StepBatch
from ops.bench.host_time import BLOCK_SIZE, MODEL, NullRunner
from ops.bench.table import print_table

MAX_TOKENS = 1024
CASES = ((100, 1024), (8, 8), (16, 128))  # the fewest and the most tokens of a completion
PLACES = {"as they become free": False, "together": True}


class CountingRunner(NullRunner):
    """Counts steps, those that no graph serves, and the rows of all."""

    num_steps = num_mixed = num_rows = 0

    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        """As a NullRunner."""
        self.num_steps += 1
        self.num_mixed += not len(step.token_ids) == len(step.query_lens) == len(step.sample_rows)
        self.num_rows += len(step.query_lens)
        return super().launch(step, sampling)


def drain(num_requests: int, num_slots: int, lengths: tuple[int, int], *, together: bool) -> CountingRunner:
    """Run the requests to their ends. lengths: the fewest and the most tokens of a completion."""
    rng = random.Random(0)
    runner = CountingRunner(num_slots, 2 * MAX_TOKENS + BLOCK_SIZE)
    runner.has_graphs = together

    def start_runner(config: EngineConfig, model: ModelConfig, folder: Path) -> CountingRunner:
        return runner

    config = EngineConfig(
        str(MODEL), max_num_seqs=num_slots, block_size=BLOCK_SIZE, async_scheduling=True,
        max_num_batched_tokens=8192,
    )  # fmt: skip
    with Engine(config, start_runner=start_runner) as engine:
        for i in range(num_requests):
            prompt = rng.choices(range(10, 500), k=rng.randint(100, MAX_TOKENS))
            params = SamplingParams(max_tokens=rng.randint(*lengths), temperature=0.0, ignore_eos=True)
            engine.add(str(i), prompt, params)
        while engine.has_unfinished:
            engine.step()
    return runner


def main() -> None:
    """Drain each case both ways; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--slots", type=int, default=256)
    options = parser.parse_args()
    rows = []
    for lengths in CASES:
        for name, together in PLACES.items():
            run = drain(options.requests, options.slots, lengths, together=together)
            rows.append(
                [
                    f"{lengths[0]} to {lengths[1]} new tokens, places given {name}",
                    str(run.num_steps),
                    f"{run.num_mixed / run.num_steps:.1%}",
                    f"{run.num_rows / run.num_steps:.0f}",
                ]
            )
    print_table(
        [f"{options.requests} requests, {options.slots} slots", "steps", "mixed", "rows a step"], rows
    )


if __name__ == "__main__":
    main()
