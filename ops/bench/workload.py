"""A workload: prompts as token ids with the number of tokens each is answered with; its file and its timing.

The file is JSON: {"name": ..., "model": ..., "seqs": [{"prompt": [token ids], "max_tokens": n}, ...]}. Every
sequence is decoded to its full length, whatever end tokens it gives. `"first_logprobs": n` in it asks for n log
probabilities of each token of the first sequence.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ops.bench.parts import seconds_by_part

WARM_UP_SHIFT = 5000  # other token ids, so that no prefix of the counted run is cached
#: Takes prompts and lengths, and `first_logprobs` where a workload has it; returns the new tokens of each.
Generate = Callable[..., list[list[int]]]


@dataclass(frozen=True)
class Workload:
    """Prompts, and how many tokens to generate for each; `model` is the shape it is meant for.

    first_logprobs: log probabilities wanted of each token of the first sequence, 0 for none.
    """

    name: str
    model: str
    prompts: list[list[int]]
    lengths: list[int]
    first_logprobs: int = 0

    def __str__(self) -> str:
        return (
            f"{len(self.prompts)} sequences, {sum(map(len, self.prompts)):,} prompt tokens, "
            f"{sum(self.lengths):,} to generate, for {self.model}"
        )

    @classmethod
    def read(cls, path: Path) -> Workload:
        """Read a workload's file."""
        found = json.loads(path.read_text())
        prompts = [seq["prompt"] for seq in found["seqs"]]
        lengths = [seq["max_tokens"] for seq in found["seqs"]]
        return cls(found["name"], found["model"], prompts, lengths, found.get("first_logprobs", 0))

    def shifted(self, shift: int) -> Workload:
        """The same with other token ids, no more of them than before."""
        vocab_size = 1 + max(map(max, self.prompts))
        prompts = [
            [(token_id + shift) % vocab_size for token_id in prompt] for prompt in self.prompts
        ]
        return replace(self, prompts=prompts)

    def write(self, path: Path) -> None:
        """Write a workload's file."""
        pairs = zip(self.prompts, self.lengths, strict=True)
        seqs = [{"prompt": prompt, "max_tokens": length} for prompt, length in pairs]
        found: dict[str, Any] = {"name": self.name, "model": self.model, "seqs": seqs}
        if self.first_logprobs:
            found["first_logprobs"] = self.first_logprobs
        path.write_text(json.dumps(found))

    def answer(self, generate: Generate) -> list[list[int]]:
        """Answer all prompts at once; return the new tokens of each."""
        if self.first_logprobs:
            return generate(self.prompts, self.lengths, first_logprobs=self.first_logprobs)
        return generate(self.prompts, self.lengths)


def measure(generate: Generate, workload: Workload) -> dict[str, Any]:
    """Run a small batch of other prompts, then all sequences at once: seconds, output tokens per second.

    cpu_s is of this process's processors: on a busy machine it says more than wall_s.
    """
    others = workload.shifted(WARM_UP_SHIFT).prompts[:4]
    generate(others, [8] * len(others))
    started, cpu_started = time.perf_counter(), time.process_time()
    outputs = workload.answer(generate)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    num_tokens = sum(map(len, outputs))
    return {
        "workload": workload.name,
        "wall_s": round(wall_s, 3),
        "cpu_s": round(cpu_s, 3),
        "out_tokens": num_tokens,
        "tok_s": round(num_tokens / wall_s, 2),
        "self_hwm_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "outputs": outputs,
    }


def run(
    options: argparse.Namespace,
    peer: str,
    generate: Generate,
    more: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Do what the options ask: report one workload, with what `more` tells after it, or take turns."""
    if options.turns:
        take_turns(generate)
    else:
        result = measure(generate, Workload.read(options.workload))
        report({"peer": peer, **result, **more()}, options.out)


def take_turns(generate: Generate) -> None:
    """Be a peer of `ops.bench.peers`: a line of standard input for each turn, a RESULT for each line."""
    generate([[1, 2, 3]] * 4, [8] * 4)
    print("READY", flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        workload = Workload.read(Path(turn["workload"])).shifted(turn["shift"])
        if turn.get("parts"):
            parts = seconds_by_part(partial(workload.answer, generate))
            print("RESULT " + json.dumps(parts), flush=True)
            continue
        started = time.perf_counter()
        outputs = workload.answer(generate)
        tok_s = sum(map(len, outputs)) / (time.perf_counter() - started)
        print("RESULT " + json.dumps({"tok_s": round(tok_s, 2), "outputs": outputs}), flush=True)


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What every runner of a workload takes."""
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", type=Path)
    parser.add_argument(
        "--turns", action="store_true", help="take the workloads from ops.bench.peers"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="where to write the result with all output tokens")
    options = parser.parse_args()
    if (options.workload is None) != options.turns:
        parser.error("give either --workload or --turns")
    return options


def report(result: dict[str, Any], out: Path | None) -> None:
    """Print a RESULT line, and write it with the output tokens."""
    if out is not None:
        out.write_text(json.dumps(result))
    print(
        "RESULT " + json.dumps({key: value for key, value in result.items() if key != "outputs"}),
        flush=True,
    )
