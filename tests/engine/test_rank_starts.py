"""Ranks start together or not at all, and end with their driver."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from engine import (
    Engine,
    MissingWeights,
    RankFailed,
)
from engine.tensor_parallel import rank_group
from engine.tensor_parallel.rank_process import RankProcess
from tests.engine.two_ranks import (
    SHAPE_OF,
    config,
)

pytestmark = pytest.mark.long


def test_missing_weights_are_the_error_one_process_would_raise(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """And no rank is left, whichever of them said so first."""
    folder = Path(shutil.copytree(folders["gqa1_untied"], tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    before = psutil.Process().children(recursive=True)
    with pytest.raises(MissingWeights, match=r"rank [01]: .* lacks 1 tensors .* model\.norm\.weight"):
        Engine(config(folder, SHAPE_OF["gqa1_untied"]))
    assert psutil.Process().children(recursive=True) == before


def test_a_rank_that_dies_while_it_starts_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stillborn(RankProcess):
        def __init__(self, rank: int, timeout_s: float) -> None:
            super().__init__(rank, timeout_s)
            if rank == 1:
                os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(rank_group, "RankProcess", Stillborn)
    before = psutil.Process().children(recursive=True)
    with pytest.raises(RankFailed, match="rank 1 failed: it was killed by SIGKILL"):
        Engine(config(folder, SHAPE_OF["gqa2_tied_hub"]))
    assert psutil.Process().children(recursive=True) == before


ROOT = Path(__file__).parents[2]
DRIVER = """
import sys, threading, time
import torch
from engine import Engine, EngineConfig, SamplingParams

model, in_main_thread = sys.argv[1], sys.argv[2] == "main"
torch.set_num_threads(1)
made = []
make = lambda: made.append(Engine(EngineConfig(model, kv_cache_bytes=1 << 22, tensor_parallel_size=2)))
if in_main_thread:
    make()
else:
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
(engine,) = made
engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
print(*engine._live_runner.pids, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("made_by", ["main", "a thread that has ended"])
def test_ranks_die_with_a_driver_that_is_killed(folder: Path, made_by: str) -> None:
    """Frozen ones through the kernel, where the main thread made them; others also by their lifeline."""
    command = [sys.executable, "-c", DRIVER, str(folder), made_by]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    ranks = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    assert len(ranks) == 2
    for rank in ranks:
        for number in (signal.SIGINT, signal.SIGTERM):  # not theirs to act on
            rank.send_signal(number)
        assert os.getpgid(rank.pid) != os.getpgid(driver.pid)
        if made_by == "main" and sys.platform == "linux":
            rank.suspend()
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert psutil.wait_procs(ranks, timeout=5)[1] == []
