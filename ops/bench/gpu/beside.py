"""Ours beside another engine on one GPU: both stay loaded and take turns, round after round.

    python -m ops.bench.gpu.beside --peer "env PYTHONPATH=SITE python3 -m ops.bench.gpu.vllm_turns"

Qwen3-0.6B's shape with random weights in bfloat16, temperature 0.6, every answer to its full length. Both engines get
the same bytes for keys and values. They are started once for 256 sequences at once and once for 1,024. The peer's
command gets our runner's options after it and speaks the protocol of `ops.bench.peers`.

When the budget is over, what runs is ended and what is known is printed. Whole rounds count.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ops.bench.gpu.scoring import ROW_SHAPES, RowShape, make_rows, small
from ops.bench.make import OUT, SHAPES, WORKLOADS, existing_checkpoint
from ops.bench.peers import OURS, PYTHON, Peer, started, summarize, take_turns
from ops.bench.report import print_machine, print_table
from ops.bench.workload import Workload

OURS_COMMAND = f"{PYTHON} -m ops.bench.engine"
OPTIONS = (
    "--turns --model {model} --dtype {dtype} --threads {threads} --temperature 0.6"
    " --max-model-len {max_model_len} --max-num-seqs {max_num_seqs} --kv-cache-bytes {kv_cache_bytes}"
)
LOG_LINES = 40  # of an engine that failed
WARM_UP_ROWS, WARM_UP_TOKENS = 64, 8
WARM_UP_ROUND = 1000  # its token ids are those of no other round
#: The reference run, which stands in WORKLOADS with the very tokens of nano-vLLM's benchmark.
REFERENCE = RowShape("256 sequences, 100 to 1,024 in and out", 256, 0, (100, 1024), (100, 1024), {})
STEADY = RowShape("1,500 rows, 100 to 300 in and out", 1500, 0, (100, 300), (100, 300), {})
MANY = RowShape("1,024 sequences, 100 to 300 in and out", 1024, 0, (100, 300), (100, 300), {})
#: By the sequences that run at once.
SHAPES_BY_SEQS = {
    256: (
        REFERENCE,
        STEADY,
        *(shape for shape in ROW_SHAPES if shape.shared),
        *(shape for shape in ROW_SHAPES if "logprobs" in shape.first),
    ),
    1024: (MANY,),
}
Record = dict[str, Any]


class TimeIsUpError(Exception):
    """Raised in the main thread when the budget is over."""


@dataclass(frozen=True)
class Given:
    """What both engines get, but for the number of sequences, and how often they run."""

    model: Path
    dtype: str
    max_model_len: int
    kv_cache_bytes: int
    rounds: int

    def options(self, max_num_seqs: int) -> str:
        """The arguments of a runner."""
        return OPTIONS.format(
            model=shlex.quote(str(self.model.resolve())),
            dtype=self.dtype,
            threads=len(os.sched_getaffinity(0)),
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_bytes=self.kv_cache_bytes,
        )


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeIsUpError in the block once the seconds are over."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeIsUpError(f"the {seconds:.0f} s are over")

    handler = signal.signal(signal.SIGALRM, end)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s)
        signal.signal(signal.SIGALRM, handler)


def workload_of(shape: RowShape, vocab_size: int, seed: int) -> Workload:
    """A workload of the shape. Two of different seeds share no prefix."""
    prompts, params = make_rows(shape, vocab_size, seed)
    lengths = [each.max_tokens for each in params]
    first_logprobs = shape.first.get("logprobs", 0)
    return Workload(shape.name, "q06b", prompts, lengths, first_logprobs)


def warm_up_of(workload: Workload) -> Workload:
    """The first rows with short answers: what they launch is compiled before a round counts."""
    lengths = [min(WARM_UP_TOKENS, length) for length in workload.lengths[:WARM_UP_ROWS]]
    return replace(workload, prompts=workload.prompts[:WARM_UP_ROWS], lengths=lengths)


def write_workloads(folder: Path, *, dry_run: bool) -> dict[int, list[Path]]:
    """Write all workloads into the folder, each with its warm-up; return their files by sequences at once."""
    vocab_size = SHAPES["tiny" if dry_run else "q06b"].vocab_size
    files: dict[int, list[Path]] = {}
    seed = 0
    for max_num_seqs, shapes in SHAPES_BY_SEQS.items():
        files[max_num_seqs] = []
        for shape in shapes:
            seed += 1
            workload = workload_of(small(shape) if dry_run else shape, vocab_size, seed)
            if shape is REFERENCE and not dry_run:
                workload = replace(WORKLOADS["mixed256"], name=shape.name)
            path = folder / f"beside-{seed}.json"
            workload.write(path)
            warm_up_of(workload).write(warm_up_file(path))
            files[max_num_seqs].append(path)
    return files


def warm_up_file(workload: Path) -> Path:
    """The file of a workload's warm-up."""
    return workload.with_suffix(".warm.json")


def start(stack: ExitStack, commands: Mapping[str, str], folder: Path) -> list[Peer]:
    """Start the engines one after the other: each measures the memory that is left. Raises RuntimeError."""
    peers = []
    for name, command in commands.items():
        begun = time.monotonic()
        peer = stack.enter_context(started(name, command, log_of(name, folder)))
        peer.wait_until_ready()
        print(f"{name} is ready after {time.monotonic() - begun:.0f} s", flush=True)
        peers.append(peer)
    return peers


def log_of(name: str, folder: Path) -> Path:
    """Where an engine's errors go."""
    return folder / f"beside-{name}.log"


def run_rounds(peers: Sequence[Peer], files: Sequence[Path], rounds: int) -> Iterator[list[Record]]:
    """Warm up; let each round run every workload. Yield the records of a workload in a round."""
    for file in files:
        for peer in peers:
            peer.run(warm_up_file(file), WARM_UP_ROUND)
    for number in range(rounds):
        for file in files:
            workload = Workload.read(file)
            print(workload.name, flush=True)
            records = take_turns(peers, file, [number])
            for record in records:
                lengths = [len(tokens) for tokens in record["outputs"]]
                if lengths != workload.lengths:
                    raise RuntimeError(f"{record['name']} did not answer to the full length")
            yield [{"workload": workload.name, **record} for record in records]


def print_results(records: Sequence[Record]) -> None:
    """A row for each workload; ratios are within rounds."""
    rows = []
    for name in dict.fromkeys(record["workload"] for record in records):
        own = [record for record in records if record["workload"] == name]
        no_memory = dict.fromkeys((record["name"] for record in own), 0.0)
        rows += [[name, *row[1:4]] for row in summarize(own, no_memory)]
    print_table(["output tokens/s", OURS, "peer", "ratio in a round"], rows)


def write_results(records: Sequence[Record], path: Path) -> None:
    """Write all records without the tokens."""
    shown = [
        {key: record[key] for key in ("workload", "name", "round", "tok_s")} for record in records
    ]
    path.write_text(json.dumps({"beside": shown}))


def measure(
    commands: Mapping[str, str], given: Given, files: Mapping[int, Sequence[Path]], out: Path
) -> Iterator[Record]:
    """Start the engines for each number of sequences; yield a record for each run of whole rounds."""
    for max_num_seqs, own in files.items():
        asked = {
            name: f"{command} {given.options(max_num_seqs)}" for name, command in commands.items()
        }
        print(f"\n{max_num_seqs} sequences at once", flush=True)
        with ExitStack() as stack:
            peers = start(stack, asked, out)
            for records in run_rounds(peers, own, given.rounds):
                yield from records


def main() -> int:
    """Let both take turns; print a table of what ran. Returns 1 if an engine ended or the time was up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peer", required=True, help="command of the other engine's runner")
    parser.add_argument("--name", default="peer", help="of the other engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=480, help="seconds for all")
    parser.add_argument("--kv-cache-bytes", type=int, default=48 * 2**30, help="of each engine")
    parser.add_argument("--folder", type=Path, default=OUT, help="of the checkpoint and workloads")
    parser.add_argument("--out", type=Path, help="folder of logs and beside.json; --folder if none")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    options = parser.parse_args()
    folder: Path = options.folder
    out: Path = options.out or folder
    folder.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    commands = {OURS: OURS_COMMAND, options.name: options.peer}
    ended = ""
    records: list[Record] = []
    print_machine()
    try:
        with time_limit(options.budget):
            shape, dtype = ("tiny", torch.float32) if options.dry_run else ("q06b", torch.bfloat16)
            model = existing_checkpoint(folder / f"beside-{shape}", shape, dtype)
            given = Given(
                model=model,
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=64 if options.dry_run else 4096,
                kv_cache_bytes=2**20 if options.dry_run else options.kv_cache_bytes,
                rounds=options.rounds,
            )
            files = write_workloads(folder, dry_run=options.dry_run)
            for record in measure(commands, given, files, out):
                records.append(record)
                write_results(records, out / "beside.json")
    except (TimeIsUpError, RuntimeError, BrokenPipeError) as error:
        ended = str(error)
    print()
    print_results(records)
    if ended:
        print(f"\nended before all rounds: {ended}")
        for name in commands:
            print_end(log_of(name, out))
    return int(bool(ended))


def print_end(log: Path) -> None:
    """Print the last lines of a log, if there is one."""
    if log.exists():
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join([f"== {log}", *lines[-LOG_LINES:]]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
