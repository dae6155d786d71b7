"""Slips of the pen in the attention kernels: each is seen by the checks that the true kernels pass."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

import engine.kernels
from tests.engine.paged import PagedBatch, make_batch
from tests.engine.test_kernels_attention import KERNELS, counters, decode, prefill, set_tile

pytestmark = pytest.mark.long

# Each is one slip of the pen in a kernel: file, right, wrong.
MUTATIONS = {
    "decode forgets its own token": (
        "decode_attention.py", "+ (context_len - 1)", "+ (context_len - 2)",
    ),
    "decode reads one token too far": (
        "decode_attention.py", "end = tl.minimum(start + length, context_len)",
        "end = tl.minimum(start + length, context_len + 1)",
    ),
    "splits overlap": ("decode_attention.py", "first + split * length", "first + split * (length - 1)"),
    "splits begin a token late": (
        "decode_attention.py", "start = first + split * length", "start = first + split * length + 1",
    ),
    "splits of another length than their number is for": (
        "decode_attention.py", "tl.cdiv(context_len - first, length), 1)",
        "tl.cdiv(context_len - first - 1, length), 1)",
    ),
    "merge drops the last split": (
        "decode_attention.py", "seq * max_splits * HEADS + kv_head * GROUP, num_splits,",
        "seq * max_splits * HEADS + kv_head * GROUP, num_splits - 1,",
    ),
    "the last but one merges": ("decode_attention.py", "== num_programs - 1", "== num_programs - 2"),
    "programs that have nothing to do are waited for": (
        "decode_attention.py", "num_programs = tl.minimum(num_splits, tl.num_programs(2))",
        "num_programs = tl.num_programs(2)",
    ),
    "the counter stays as it is": ("decode_attention.py", "tl.store(arrived, 0)", "tl.store(arrived, 1)"),
    "merge weighs splits by a wrong sum": (
        "decode_attention.py", "row_max + tl.log2(row_sum)", "row_max",
    ),
    "the mask hides the query's own token": (
        "kv_tile.py", "tokens[None, :] <= last", "tokens[None, :] < last",
    ),
    "the mask lets the next token through": (
        "kv_tile.py", "<= last[:, None]", "<= last[:, None] + 1",
    ),
    "values past the end are read": (
        "kv_tile.py", "values_ptr + places, mask=read", "values_ptr + places, mask=inside[None, :]",
    ),
    "no mask one tile too long": (
        "prefill_attention.py", "(first_token + 1 - begin) // TILE * TILE",
        "tl.cdiv(first_token + 1 - begin, TILE) * TILE",
    ),
    "chunks are placed at the start of the context": (
        "prefill_attention.py", "first_token = context_len - num_queries + tile_start",
        "first_token = tile_start",
    ),
    "the wrong KV head": ("prefill_attention.py", "head // GROUP", "head % GROUP"),
}  # fmt: skip
FEATURE_MUTATIONS = {
    "the window is a token too wide": ("kv_tile.py", "position - (WINDOW - 1)", "position - WINDOW"),
    "the window is a token too narrow": ("kv_tile.py", "position - (WINDOW - 1)", "position - (WINDOW - 2)"),
    "chunks begin a token late": ("kv_tile.py", "position // CHUNK", "(position - 1) // CHUNK"),
    "a tile's queries see what its first one does": ("kv_tile.py", "if first is not None:", "if False:"),
    "the window is masked one tile too short": (
        "prefill_attention.py", "tl.cdiv(first_seen(end - 1, WINDOW, CHUNK) - begin, TILE)",
        "(first_seen(end - 1, WINDOW, CHUNK) - begin) // TILE",
    ),
    "each split has the sink": ("decode_attention.py", "tl.where(split == 0, ", "tl.where(split >= 0, "),
    "decode leaves the sink out": (
        "decode_attention.py", "tl.where(split == 0, 1.0, row_sum)", "row_sum",
    ),
    "decode takes the sink in base 2": ("decode_attention.py", "other=0.0) * LOG2_E", "other=0.0)"),
    "prefill leaves the sink out": ("prefill_attention.py", "row_sum += 1.0", "row_sum += 0.0"),
    "prefill takes the sink in base 2": (
        "prefill_attention.py", "tl.load(sinks_ptr + head) * LOG2_E", "tl.load(sinks_ptr + head)",
    ),
    "the soft cap is left out": ("kv_tile.py", "scores = cap_scores(scores, SOFT_CAP)", "scores = scores"),
    "the soft cap is in base 2": ("kv_tile.py", "soft_cap * LOG2_E.value", "soft_cap"),
}  # fmt: skip

FP8_MUTATIONS = {
    f"{kernel} takes the {what} of {wrong}": (f"{kernel}_attention.py", right, right.replace(*change))
    for kernel in ("decode", "prefill")
    for what, right in (
        ("keys' scale", "log2_scale *= tl.load(key_scales_ptr + kv_head)"),
        ("values' scale", "result *= tl.load(value_scales_ptr + kv_head)"),
    )
    for wrong, change in (
        ("the first head", (" + kv_head", "")),
        ("the others", ("key_" if "key_" in right else "value_", "value_" if "key_" in right else "key_")),
    )
}


@pytest.fixture
def mutant(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SimpleNamespace]:
    """The attention kernels with one line changed, imported from a copy under another name."""
    file, right, wrong = (MUTATIONS | FEATURE_MUTATIONS | FP8_MUTATIONS)[request.param]
    package = tmp_path / "mutant_kernels"
    shutil.copytree(Path(engine.kernels.__file__).parent, package, ignore=shutil.ignore_patterns("*.pyc"))
    for path in package.glob("*.py"):
        text = path.read_text()
        assert path.name != file or right in text
        text = text.replace(right, wrong) if path.name == file else text
        path.write_text(text.replace("engine.kernels", "mutant_kernels"))
    monkeypatch.syspath_prepend(tmp_path)
    yield SimpleNamespace(
        decode_attention=importlib.import_module("mutant_kernels.decode_attention"),
        prefill_attention=importlib.import_module("mutant_kernels.prefill_attention"),
    )
    for name in [name for name in sys.modules if name.startswith("mutant_kernels")]:
        del sys.modules[name]


def checked_kernels() -> tuple[PagedBatch, PagedBatch]:
    """Decodes and chunks that show a slip in a kernel."""
    return make_batch([1, 60, 97], head_dim=32), make_batch([70, 90], [70, 20], head_dim=32)


def checked_features() -> tuple[PagedBatch, PagedBatch]:
    """Decodes and chunks that show a slip in a feature."""
    features = {"window": 50, "chunk": 80, "soft_cap": 1.0, "has_sinks": True}
    return (
        make_batch([1, 60, 79, 80, 81], head_dim=16, kv_heads=1, **features),
        make_batch([70, 90], [70, 20], head_dim=16, kv_heads=1, **features),
    )


def checked_scales() -> tuple[PagedBatch, PagedBatch]:
    """Decodes and chunks that show a slip with the scales of an fp8 cache."""
    return make_batch([1, 60], head_dim=16).as_fp8(), make_batch([70, 20], [3, 20], head_dim=16).as_fp8()


@pytest.mark.parametrize("batches", [checked_kernels, checked_features, checked_scales])
def test_what_shows_a_slip_passes_without_one(
    batches: Callable[[], tuple[PagedBatch, PagedBatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tile(monkeypatch, KERNELS, 16)
    assert worst_error(*batches(), KERNELS) < 1e-3


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")  # a mutant's NaN
@pytest.mark.parametrize("mutant", MUTATIONS, indirect=True)
def test_a_slip_in_a_kernel_is_caught(mutant: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, mutant, 16)
    assert worst_error(*checked_kernels(), mutant) > 1e-3


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
@pytest.mark.parametrize("mutant", FEATURE_MUTATIONS, indirect=True)
def test_a_slip_in_a_feature_is_caught(mutant: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, mutant, 16)
    assert worst_error(*checked_features(), mutant) > 1e-3


@pytest.mark.parametrize("mutant", FP8_MUTATIONS, indirect=True)
def test_a_slip_with_scales_is_caught(mutant: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, mutant, 16)
    assert worst_error(*checked_scales(), mutant) > 1e-3


def worst_error(decodes: PagedBatch, chunks: PagedBatch, kernels: Any) -> float:
    """Of decodes in up to three splits by as many programs, twice over the same counters, and of chunks."""
    arrived = counters(decodes)
    return max(
        *(
            decodes.error(decode(decodes, split=48, programs=3, arrived=arrived, kernels=kernels))
            for _ in "12"
        ),
        chunks.error(prefill(chunks, kernels=kernels)),
    )
