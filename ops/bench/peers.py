"""Output tokens per second of engines that stay loaded and take turns, with ratios within rounds.

    python -m ops.bench.peers --workloads W1 W2 --rounds 5 --dtypes float32 bfloat16 --peers peers.json

A shared machine drifts within minutes, and some engines take a minute to start: here each is started once,
and in every round all of them run one after the other, a few seconds apart. The checkpoint and the workloads
are made where they are missing. peers.json names peers by a shell command, which may have {model} and
{threads} in it; without it the peer is transformers' `generate` on one padded batch:

    {"vllm bfloat16": "venv/bin/python vllm_turns.py --model {model} --dtype bfloat16"}

A peer prints READY once it is loaded and warm. Then it reads lines {"workload": path, "shift": n}, adds n
to the workload's token ids, so that no turn finds the prefixes of another in its cache, and answers each line
with `RESULT {"tok_s": ..., "outputs": [[token ids], ...]}`. It ends when its input does. Last, ours tells where
its processor seconds go (`ops/bench/parts.py`).
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from ops.bench.make import OUT, existing_checkpoint, make_workloads
from ops.bench.report import print_machine, print_table, spread
from ops.bench.workload import Workload

OURS = "tokenmill"
PYTHON = shlex.quote(sys.executable)
RUNNER = "--model {model} --threads {threads} --turns"
TRANSFORMERS = {"transformers": f"{PYTHON} -m ops.bench.padded {RUNNER}"}
SHIFT = 101  # of the token ids from one round to the next
END_S = 30.0  # for a peer to end once its input has


class Peer:
    """An engine in a process of its own, which waits for its turn."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self._process, self._log = process, log
        self.pid = process.pid
        self.peak_mib = 0.0

    def wait_until_ready(self) -> None:
        """Wait until it is loaded. Raises RuntimeError if it ends instead."""
        self._line_after("READY")

    def run(self, workload: Path, shift: int, **more: bool) -> dict[str, Any]:
        """Let it run a workload; return its RESULT. Raises RuntimeError if it ends instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps({"workload": str(workload), "shift": shift, **more}) + "\n"
        )
        self._process.stdin.flush()
        result: dict[str, Any] = json.loads(self._line_after("RESULT "))
        self.peak_mib = max(self.peak_mib, tree_rss_mib(psutil.Process(self.pid)))
        return result

    def _line_after(self, mark: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()}; see {self._log}")


def tree_rss_mib(process: psutil.Process) -> float:
    """Resident memory of a process and all below it; pages they share count for each."""
    total = 0
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total / 2**20


@contextmanager
def started(name: str, command: str, log: Path) -> Iterator[Peer]:
    """A peer's process, which ends with the block: by itself, or killed if the block raises."""
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            shell=True,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Peer(name, process, log)
            with contextlib.suppress(subprocess.TimeoutExpired):
                # closes its input, and reads what it still prints
                process.communicate(timeout=END_S)
        finally:
            # what it started may outlive it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def take_turns(
    peers: Sequence[Peer], workload: Path, rounds: Iterable[int]
) -> list[dict[str, Any]]:
    """Run a workload with all peers in each of the numbered rounds, each beginning with another one."""
    records = []
    for number in rounds:
        first = number % len(peers)
        for peer in [*peers[first:], *peers[:first]]:
            found = {"name": peer.name, "round": number, **peer.run(workload, SHIFT * (number + 1))}
            records.append(found)
            print(json.dumps({key: found[key] for key in ("name", "round", "tok_s")}), flush=True)
    return records


def summarize(records: list[dict[str, Any]], peak_mib: Mapping[str, float]) -> list[list[str]]:
    """A row for each of ours beside each peer: both speeds, the ratio within rounds, memory, agreement."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda record: int(record["round"])):
        runs.setdefault(record["name"], []).append(record)
    rows = []
    for ours, other in product(runs, runs):
        if not ours.startswith(OURS) or other.startswith(OURS):
            continue
        pairs = list(zip(runs[ours], runs[other], strict=True))
        same = [
            a == b
            for own, peer in pairs
            for a, b in zip(own["outputs"], peer["outputs"], strict=True)
        ]
        rows.append(
            [
                f"{ours} / {other}",
                spread([own["tok_s"] for own, _ in pairs], 0),
                spread([peer["tok_s"] for _, peer in pairs], 0),
                spread([own["tok_s"] / peer["tok_s"] for own, peer in pairs]),
                f"{peak_mib[ours]:,.0f} / {peak_mib[other]:,.0f}",
                f"{statistics.mean(same):.0%}",
            ]
        )
    return rows


def read_peers(path: Path) -> dict[str, str]:
    """Names and commands. Raises OSError, and ValueError for a file that is no such object of JSON."""
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or not all(
        isinstance(command, str) for command in found.values()
    ):
        raise ValueError('expected an object of names and commands, {"name": "command", ...}')
    return found


def run_all(
    commands: Mapping[str, str], model: Path, paths: Sequence[Path], options: argparse.Namespace
) -> None:
    """Start the commands by their names; print a table for each workload. Raises RuntimeError if one ends."""
    with ExitStack() as stack:
        peers = []
        for name, command in commands.items():
            command = command.replace("{model}", shlex.quote(str(model.resolve())))
            command = command.replace("{threads}", str(options.threads))
            log = options.folder / f"{name.replace(' ', '-')}.log"
            peers.append(stack.enter_context(started(name, command, log)))
            peers[-1].wait_until_ready()
        for path in paths:
            records = take_turns(peers, path.resolve(), range(options.rounds))
            print(
                f"\n{path.stem}: {Workload.read(path)}; {options.rounds} rounds, {options.threads} threads"
            )
            print_table(
                ["", "tok/s", "theirs", "ours / theirs", "MiB, ours / theirs", "same output"],
                summarize(records, {peer.name: peer.peak_mib for peer in peers}),
            )
            for peer in peers:
                if peer.name.startswith(OURS):
                    parts = peer.run(path.resolve(), SHIFT * (options.rounds + 1), parts=True)
                    told = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())
                    print(f"{peer.name}, processor seconds: {told}", flush=True)


def main() -> None:
    """Start all, let them take turns on each workload, print a table for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=OUT, help="of the checkpoint, workloads and logs"
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=["W1", "W2"],
        choices=make_workloads(),
        help="of one model",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the workloads")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="those of ours")
    parser.add_argument("--kv-cache-bytes", type=int, default=2**30, help="of ours")
    parser.add_argument("--peers", type=Path, help="JSON: names and commands")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    try:
        others = read_peers(options.peers) if options.peers else TRANSFORMERS
    except (OSError, ValueError) as error:
        parser.error(f"--peers {options.peers}: {error}")
    options.folder.mkdir(parents=True, exist_ok=True)
    model_name = make_workloads()[options.workloads[0]].model
    model = existing_checkpoint(options.folder / model_name, model_name)
    paths = []
    for seed in options.seeds:
        workloads = make_workloads(seed)
        for name in options.workloads:
            file_name = f"{name}-{seed}.json" if seed else f"{name}.json"
            path = options.folder / file_name
            workloads[name].write(path)
            paths.append(path)
    ours = (
        f"{PYTHON} -m ops.bench.engine {RUNNER} --kv-cache-bytes {options.kv_cache_bytes} --dtype"
    )
    print_machine()
    try:
        run_all({**{f"{OURS} {dtype}": f"{ours} {dtype}" for dtype in options.dtypes}, **others},
                model, paths, options)  # fmt: skip
    except RuntimeError as error:  # a peer ended
        sys.exit(str(error))


if __name__ == "__main__":
    main()
