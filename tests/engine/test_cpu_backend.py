"""The cpu backend attends as float64 does, on any number of threads, and says where it cannot."""

import importlib
import logging
import os
import pkgutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed, so the CPU kernels cannot be compiled")

import numba
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from engine import cpu_kernels
from engine.attention import load_backend
from engine.attention.cpu_backend import CpuBackend
from engine.attention.features import AttentionFeatures
from engine.attention.torch_backend import TorchBackend
from engine.cpu_kernels import kernel as kernel_module
from engine.cpu_kernels.kernel import Kernel, next_task
from engine.cpu_kernels.scalars import pointer_to
from engine.errors import ConfigError
from tests.engine.paged import attend_by, make_batch

CPU = torch.device("cpu")

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend(CPU)


@both_dtypes
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"window": 70},
        pytest.param({"has_sinks": True, "soft_cap": 1.5}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_prompt_gets_the_same_bits_in_chunks(
    backend: CpuBackend, features: dict[str, Any], dtype: torch.dtype
) -> None:
    """Of a dozen tokens and more, cut anywhere, and in other company."""
    whole = make_batch([150, 30], [150, 30], head_dim=32, group=3, dtype=dtype, **features)
    together = attend_by(backend, whole)
    start = 0
    for end in (12, 39, 65, 128, 150):
        piece = replace(
            whole,
            query=whole.query[start:end],
            block_tables=whole.block_tables[:1],
            context_lens=np.array([end]),
            query_lens=np.array([end - start]),
        )
        assert torch.equal(attend_by(backend, piece), together[start:end])
        start = end


def count_task(parameters: Any) -> None:
    """Each task adds 1 to its own cell."""
    counts = pointer_to(parameters[3], numba.int64)
    task = next_task(parameters)
    while task >= 0:
        counts[task] += 1
        task = next_task(parameters)


@pytest.mark.parametrize("own_threads", [False, True])
def test_each_task_runs_once(
    own_threads: bool, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On torch's OpenMP team, and on threads of our own where that is not libgomp."""
    if own_threads:
        monkeypatch.setattr(kernel_module, "_torch_libgomp", lambda: None)
        monkeypatch.setattr(kernel_module, "_run_in_team", kernel_module._run_in_team.__wrapped__)
    count = Kernel(count_task)
    for num_tasks in (0, 1, 2, 3, 500):
        counts = torch.zeros(501, dtype=torch.int64)
        count(num_tasks, counts)
        assert counts.tolist() == [1] * num_tasks + [0] * (501 - num_tasks)


@pytest.fixture
def forked(tmp_path: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The children that compiled into an empty cache, each forked while no other thread compiles."""
    pids, fork = [], os.fork

    def noted() -> int:
        assert global_compiler_lock.is_locked()
        pids.append(fork())
        return pids[-1]

    monkeypatch.setattr(os, "fork", noted)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return pids


def in_children(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Have them do this in place of compiling, with the number of the process that waits for them.

    Not before that has left its fork: what a signal raises among Python's own steps after one is lost.
    """
    here, compile_here, fork = os.getpid(), kernel_module._compile_into, os.fork
    forked, left = os.pipe()

    def fork_and_tell() -> int:
        if child := fork():
            os.write(left, b".")
        return child

    def compile_into(*arguments: Any) -> Any:
        if os.getpid() != here:
            os.read(forked, 1)
            act(here)
            signal.pause()
        return compile_here(*arguments)

    monkeypatch.setattr(os, "fork", fork_and_tell)
    monkeypatch.setattr(kernel_module, "_compile_into", compile_into)


@pytest.fixture
def heeding() -> Iterator[None]:
    """This process leaves when it gets SIGTERM."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("children_die", [False, True])
def test_kernels_that_a_run_lacks_are_compiled_before_it_counts(
    children_die: bool, forked: list[int], heeding: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By children, if they live: this process takes them from the cache. What the run gave without them is dropped."""
    if children_die:
        in_children(monkeypatch, lambda here: os.kill(os.getpid(), signal.SIGTERM))
    kernels: list[Kernel] = []
    runs: list[list[int]] = []

    def run() -> list[int]:
        counts = torch.zeros(3, dtype=torch.int64)
        kernels.extend([] if kernels else [Kernel(count_task)])
        for kernel in kernels:
            kernel(3, counts)
        runs.append(counts.tolist())
        return runs[-1]

    assert kernel_module.run_compiled(run) == [1, 1, 1]
    assert runs == [[0, 0, 0], [1, 1, 1]]
    assert kernels[0]._compiled.cache_hits == int(not children_die)
    kernels.clear()
    assert kernel_module.run_compiled(run) == [1, 1, 1]
    assert len(runs) == 3, "nothing was missing"
    assert len(forked) == 1


def test_what_may_not_be_repeated_runs_once(backend: CpuBackend, forked: list[int]) -> None:
    """A rank's pass: others may have found what it lacks, and would not exchange sums a second time."""
    runs: list[list[int]] = []

    def run() -> torch.Tensor:
        counts = torch.zeros(3, dtype=torch.int64)
        Kernel(count_task)(3, counts)
        runs.append(counts.tolist())
        return counts

    backend.prepare(torch.float32, run, repeats=False)
    assert (runs, forked) == ([[1, 1, 1]], [])


def test_dot_products_of_pairs_are_one_instruction_where_code_is_compiled_for_it() -> None:
    """Whatever the processor has: LLVM ends the process that asks for an instruction of another one."""
    code = "from engine.cpu_kernels.vectors import DOT_PAIRS; print(DOT_PAIRS)"
    for features, found in (
        ("+avx512f,+avx512bf16", "llvm.x86.avx512bf16.dpbf16ps.512"),
        ("+avx2", "None"),
    ):
        environ = {**os.environ, "NUMBA_CPU_FEATURES": features}
        told = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
        )
        assert told.stdout.strip() == found


def test_who_is_told_to_stop_while_children_compile_leaves_none(
    forked: list[int], heeding: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_children(monkeypatch, lambda here: os.kill(here, signal.SIGTERM))
    with pytest.raises(SystemExit):
        kernel_module.run_compiled(lambda: Kernel(count_task)(3, torch.zeros(3, dtype=torch.int64)))
    with pytest.raises(ChildProcessError):
        os.waitpid(forked[0], os.WNOHANG)


@both_dtypes
def test_auto_takes_it_on_a_cpu(dtype: torch.dtype) -> None:
    chosen = load_backend("auto", CPU, dtype)
    assert isinstance(chosen, CpuBackend)
    assert chosen.layer_kernels is not None


def test_another_dtype_stays_with_torch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(load_backend("auto", CPU, torch.float16), TorchBackend)
    assert "take float32 and bfloat16, not float16" in caplog.text
    with pytest.raises(
        ConfigError, match=r"attention_backend='cpu' cannot be used: .* set dtype='float32'"
    ):
        load_backend("cpu", CPU, torch.float16)


def test_without_numba_torch_serves_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with caplog.at_level(logging.INFO):
        assert isinstance(load_backend("auto", CPU, torch.float32), TorchBackend)
    assert "pip install numba" in caplog.text
    with pytest.raises(ConfigError, match="pip install numba"):
        load_backend("cpu", CPU, torch.float32)


def test_it_refuses_other_devices_and_heads_too_large_or_odd(backend: CpuBackend) -> None:
    with pytest.raises(ConfigError, match="does not run on device='cuda', set device='cpu'"):
        load_backend("cpu", torch.device("cuda"), torch.float32)
    for head_dim in (320, 65):
        with pytest.raises(ConfigError, match=f"an even size up to 256, this model has {head_dim}"):
            backend.check_features(AttentionFeatures(2, 2, head_dim, 1.0))


def test_machine_code_that_another_user_may_have_written_is_not_run(
    kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is compiled anew, and the log names the folder; nothing in it is changed."""
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    kept.chmod(0o770)
    with caplog.at_level(logging.WARNING):
        assert sum(kernel_module._compile(count_task).cache_hits for _ in range(2)) == 0
    assert "does not serve" in caplog.text
    assert f"{kept} may be written by others (mode 770)" in caplog.text
    assert {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder in which count_task has been compiled, also where the umask lets the group write."""
    root = tmp_path / "cache" / "kernels"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(root))
    before = os.umask(0o002)
    try:
        hits = [kernel_module._compile(count_task).cache_hits for _ in range(2)]
    finally:
        os.umask(before)
    assert hits == [0, 1]
    assert [path.stat().st_mode & 0o077 for path in (root, *root.iterdir())] == [0, 0]
    assert str(root) == numba.config.CACHE_DIR, "the user's own cache moved"
    return root


SCORES = """
import torch
from engine.cpu_kernels.token_scores import score_tokens
logits = torch.randn(4000, 512, generator=torch.Generator().manual_seed(0)).mul(4).bfloat16()
totals = score_tokens(logits, torch.zeros(4000, dtype=torch.int64), torch.arange(4000))[2]
print(totals.view(torch.int32).long().cumsum(0).cumsum(0)[-1].item())
"""


@pytest.mark.long
def test_code_from_the_cache_gives_the_bits_that_it_gave_where_it_was_compiled(
    tmp_path: Path,
) -> None:
    """Of sums in any order a linker could take another copy in each of both."""
    command, where = (
        [sys.executable, "-c", SCORES],
        {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
    )
    compiled, read = (
        subprocess.run(command, env=where, stdout=subprocess.PIPE, check=True) for _ in range(2)
    )
    assert list(tmp_path.iterdir())
    assert compiled.stdout == read.stdout


def test_sums_in_any_order_are_in_no_function_that_a_kernel_may_share() -> None:
    """LLVM orders them anew wherever it makes one part of another; a shared one is whichever copy was there first."""
    found = pkgutil.iter_modules(cpu_kernels.__path__, f"{cpu_kernels.__name__}.")
    helpers = {
        helper
        for module in found
        for helper in vars(importlib.import_module(module.name)).values()
        if isinstance(helper, Dispatcher)
    }
    fast = {helper for helper in helpers if helper.targetoptions.get("fastmath")}
    assert len(fast) > 5
    for helper in helpers:
        called = {helper.py_func.__globals__.get(name) for name in helper.py_func.__code__.co_names}
        assert helper in fast or not called & fast, helper
    assert all(helper.targetoptions["forceinline"] for helper in fast)


def zeros_inside(contents: bytes) -> bytes:
    """It still unpickles: LLVM refuses it, or the process crashes when it runs, by where they are."""
    middle = len(contents) // 2
    return contents[: middle - 268] + bytes(536) + contents[middle + 268 :]


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "machine code with a page of zeros": ("*.nbc", zeros_inside),
    "machine code cut short": ("*.nbc", lambda contents: contents[: len(contents) // 2]),
    "an empty index, as after a loss of power": ("*.nbi", lambda contents: b""),
    "no checksum": ("sha256", lambda contents: b""),
}


def test_a_damaged_file_is_compiled_anew_once(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    for what, (kind, damage) in DAMAGES.items():
        (damaged,) = kept.rglob(kind)
        damaged.write_bytes(damage(damaged.read_bytes()))
        with caplog.at_level(logging.WARNING):
            assert kernel_module._compile(count_task).cache_hits == 0, what
        (folder,) = kept.iterdir()
        assert [record.getMessage() for record in caplog.records] == [
            f"a CPU kernel is compiled anew: {folder} is damaged"
        ], what
        caplog.clear()
        counts = torch.zeros(3, dtype=torch.int64)
        kernel_module.Kernel(count_task)(2, counts)
        assert counts.tolist() == [1, 1, 0], what
        assert kernel_module._compile(count_task).cache_hits == 1, what
    assert not caplog.records
