"""Threads follow the processors that other processes leave free."""

import math
import os
import time
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.layers.onednn import linear, pack_weight
from engine.run import cpu_threads
from engine.run.cpu_threads import (
    CpuThreads,
    ProcessorTime,
    choose_threads,
    read_processor_quota,
    read_processor_time,
)


@pytest.mark.parametrize(
    ("free", "current", "most", "chosen"),
    [
        (1.9, 1, 2, 2),  # the other process has gone
        (1.0, 2, 2, 1),  # one process has a processor to itself
        (1.6, 2, 2, 2),  # between the two limits all stays as it is
        (12.9, 16, 16, 13),
        (15.8, 13, 16, 16),
    ],
)
def test_there_are_as_many_threads_as_free_processors(
    free: float, current: int, most: int, chosen: int
) -> None:
    assert choose_threads(free, current, most) == chosen


def test_free_is_what_was_idle_and_what_this_process_used(two_threads: None) -> None:
    """Ten seconds: 2 idle + 8 own are one processor; 10 + 10 are two; within a second nobody looks."""
    times = [ProcessorTime(0, 0, 0), ProcessorTime(10, 8, 2), ProcessorTime(20, 18, 12)]
    later = time.monotonic() + 1000
    readings = iter([*times, ProcessorTime(later, 18, 12)])
    threads = CpuThreads(lambda: next(readings))
    for expected in (1, 2, 1, 1):  # the fourth look would find no reading
        threads.adapt()
        assert torch.get_num_threads() == expected


def test_only_processors_that_this_process_may_use_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """user nice system idle iowait, in ticks; the first line is the sum of all."""
    lines = [
        "cpu  9 9 9 9000 900 0",
        "cpu0 1 1 1 100 10 0",
        "cpu1 1 1 1 2000 0 0",
        "cpu11 1 1 1 400 0 0",
    ]
    (tmp_path / "stat").write_text("\n".join([*lines, "intr 5 5", "ctxt 7", ""]))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 11})
    found = read_processor_time(tmp_path)
    assert found is not None
    assert found.idle == 510 / os.sysconf("SC_CLK_TCK")
    assert found.processors == {"cpu0", "cpu11"}
    assert read_processor_time(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/pod/box", {"pod/box/cpu.max": "max 100000", "pod/cpu.max": "150000 100000"}, 1.5),
        ("0::/pod", {"pod/cpu.max": "400000 100000", "cpu.max": "50000 100000"}, 0.5),
        (
            "4:cpu,cpuacct:/b",
            {"cpu/b/cpu.cfs_quota_us": "200000", "cpu/b/cpu.cfs_period_us": "100000"},
            2,
        ),
        ("0::/", {}, math.inf),
    ],
)
def test_a_quota_of_processor_time_is_read(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(f"{membership}\n")
    for name, content in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    assert read_processor_quota(tmp_path, tmp_path / "groups") == quota
    assert read_processor_quota(tmp_path / "none", tmp_path) == math.inf


@pytest.mark.parametrize(("adapts", "left"), [(True, 1), (False, 2)])
def test_an_engine_that_may_takes_fewer_threads_on_a_busy_machine(
    folder: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch, adapts: bool, left: int
) -> None:
    passed = iter(
        range(0, 10_000, 2)
    )  # seconds in which neither this process computes nor anyone idles
    monkeypatch.setattr(
        cpu_threads, "read_processor_time", lambda: ProcessorTime(next(passed), 0, 0)
    )
    config = EngineConfig(str(folder), device="cpu", kv_cache_bytes=2**20, adapt_cpu_threads=adapts)
    with Engine(config) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        assert engine.stats().cpu_threads == left


def test_a_product_has_the_same_bits_with_any_number_of_threads(two_threads: None) -> None:
    """So that what a completion says does not depend on the load."""
    weight = pack_weight(torch.nn.Parameter(torch.randn(1024, 512), requires_grad=False))
    x = torch.randn(70, 512)
    by_two = linear(x, weight)
    torch.set_num_threads(1)
    assert torch.equal(linear(x, weight), by_two)
