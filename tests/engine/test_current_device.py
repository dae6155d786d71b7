"""A GPU is a thread's current one where its kernels are launched, whichever thread that is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.attention.torch_backend import TorchBackend
from engine.run.forward import model_runner
from engine.run.machine import device
from tests.engine.checkpoints import SHAPES, make_checkpoint


class FakeCuda:
    """Knows which GPU is current in each thread, as CUDA does."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self.seen: set[tuple[str, str | None]] = set()

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        self._threads.current = str(device)
        yield
        self._threads.current = None

    def note_launch(self) -> None:
        self.seen.add((threading.current_thread().name, getattr(self._threads, "current", None)))


def test_an_engine_launches_on_its_own_device_from_another_thread_than_its_makers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of two GPUs in one process; the fake's GPUs compute on the CPU."""
    cuda, forward = FakeCuda(), TorchBackend.forward

    def launch(*arguments: Any) -> torch.Tensor:
        cuda.note_launch()
        return forward(*arguments)

    monkeypatch.setattr(model_runner, "on_device", cuda.on_device)
    monkeypatch.setattr(TorchBackend, "forward", launch)
    folder = make_checkpoint(tmp_path / "model", SHAPES[0])
    config = EngineConfig(str(folder), attention_backend="torch", device="cpu", kv_cache_bytes=1 << 22)
    with Engine(config) as engine:
        used = threading.Thread(
            target=engine.generate, args=(["hello"], SamplingParams(max_tokens=3)), name="another"
        )
        used.start()
        used.join()
    assert cuda.seen == {(threading.current_thread().name, "cpu"), ("another", "cpu")}


def test_a_gpu_without_a_number_is_the_makers_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device.numbered(torch.device("cuda")) == torch.device("cuda:1")
    assert device.numbered(torch.device("cuda:0")) == torch.device("cuda:0")
    assert device.numbered(torch.device("cpu")) == torch.device("cpu")
