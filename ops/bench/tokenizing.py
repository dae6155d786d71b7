"""How long an urgent prompt waits while prompts of a mebibyte are tokenized on another lane.

    python -m ops.bench.tokenizing

The worker's loop, the engine and the demo model's tokenizer are real; only the model is replaced, by one
that computes nothing and takes prompts of any length. A short prompt is sent every PAUSE_S until the long
ones are done, or for IDLE_S where there are none.
"""

from __future__ import annotations

import argparse
import resource
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from engine import Engine, EngineConfig
from engine.checkpoint.model_config import ModelConfig
from ops.bench.host_time import BLOCK_SIZE, MODEL, NullRunner
from ops.bench.report import print_machine
from ops.bench.table import print_table
from worker.engine_thread.engine_loop import EngineLoop
from worker.engine_thread.orders import Add, Halt, Stepped

HIGH, BULK = 0, 1
PAUSE_S = 0.02
IDLE_S = 5.0
SLOTS = 4
MAX_MODEL_LEN = 1 << 20
SAMPLING = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
TEXT = "the 3rd of March, '87; "


def start_engine() -> Engine:
    """An engine that takes prompts of any length, and computes nothing."""
    runner = NullRunner(SLOTS, MAX_MODEL_LEN)

    def start_runner(config: EngineConfig, model: ModelConfig, folder: Path) -> NullRunner:
        return runner

    config = EngineConfig(str(MODEL), max_num_seqs=SLOTS, block_size=BLOCK_SIZE)
    return Engine(config, start_runner=start_runner)


class Stream:
    """Short prompts beside long ones; `waits_ms` has what each took from its order to its answer."""

    def __init__(self, num_long: int) -> None:
        self.orders: SimpleQueue[Any] = SimpleQueue()
        self.reports: SimpleQueue[Any] = SimpleQueue()
        self.waits_ms: list[float] = []
        self._long_left, self._num_sent = num_long, 0
        self._until = time.perf_counter() + (0 if num_long else IDLE_S)
        self._sent: dict[str, float] = {}

    def run(self) -> None:
        """Send prompts and take answers until the last is there."""
        while self._goes_on() or self._sent:
            if self._goes_on():
                self._send()
            next_at = time.perf_counter() + PAUSE_S
            while (wait_s := next_at - time.perf_counter()) > 0:
                self._take(wait_s)

    def _goes_on(self) -> bool:
        return self._long_left > 0 or time.perf_counter() < self._until

    def _send(self) -> None:
        name = f"short {self._num_sent}"
        self._num_sent += 1
        self._sent[name] = time.perf_counter()
        self.orders.put(Add(name, f"{name}: {TEXT}", None, SAMPLING, HIGH))

    def _take(self, wait_s: float) -> None:
        try:
            report = self.reports.get(timeout=wait_s)
        except Empty:
            return
        assert isinstance(report, Stepped), report
        for completion in report.completions:
            assert completion.error is None, completion.error
            if completion.request_id in self._sent:
                sent_at = self._sent.pop(completion.request_id)
                self.waits_ms.append(1000 * (time.perf_counter() - sent_at))
            else:
                self._long_left -= 1


def measure(num_long: int, chars: int) -> list[str]:
    """Run both kinds of prompts through one loop; return what a row of the table shows."""
    with start_engine() as engine:
        stream = Stream(num_long)
        thread = threading.Thread(target=EngineLoop(engine, stream.orders, stream.reports.put).run)
        thread.start()
        began = time.perf_counter()
        for number in range(num_long):
            text = f"{number} " + TEXT * (chars // len(TEXT) + 1)
            stream.orders.put(Add(f"long {number}", text[:chars], None, SAMPLING, BULK))
        stream.run()
        seconds = time.perf_counter() - began
        stream.orders.put(Halt())
        thread.join()
    shown = [f"{value:,.1f}" for value in (*np.percentile(stream.waits_ms, (50, 99)), max(stream.waits_ms))]
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return [f"{num_long} of {chars:,}", str(len(stream.waits_ms)), *shown, f"{seconds:.1f}", f"{peak_mib:,}"]


def main() -> None:
    """Measure without long prompts and with them; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--chars", type=int, default=1 << 20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_machine()
    print_table(
        ["long prompts", "short prompts", "ms: median", "99 % in", "most", "seconds in all", "peak RSS, MiB"],
        [measure(0, options.chars), measure(options.prompts, options.chars)],
    )


if __name__ == "__main__":
    main()
