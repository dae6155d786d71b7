"""The triton backend computes the same from any batch, is chosen rightly, and says what it needs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")


import engine.attention
from engine.attention import load_backend, triton_backend
from engine.attention.triton_backend import TritonBackend
from engine.errors import ConfigError
from tests.engine.paged import DEVICE, TOLERANCE, attend_by, make_batch


@pytest.fixture(scope="module")
def backend() -> TritonBackend:
    return TritonBackend(DEVICE)


def test_one_step_serves_layers_with_different_windows(backend: TritonBackend) -> None:
    """The metadata of a recorded step, too: it is made for the longest contexts, and padding gets zeros."""
    lens = [900, 0, 40, 129, 0]
    whole = make_batch(lens, head_dim=16, kv_heads=1)
    rows, context_lens, tables = (whole.tensor(x) for x in (range(5), lens, whole.block_tables))
    eager, _ = backend.build_metadata(whole.block_tables, whole.context_lens, whole.query_lens)
    recorded = backend.decode_metadata(rows, context_lens, tables, 40_000, None)
    for window in (None, 128, 500, 16):
        batch = replace(whole, window=window)
        for metadata in (eager, recorded):
            out = attend_by(backend, batch, metadata)
            assert batch.error(out) < TOLERANCE[torch.float32]
            assert not out[[1, 4]].any()


def test_bits_do_not_depend_on_the_batch_nor_on_being_recorded(backend: TritonBackend) -> None:
    """One long context among short ones; a recorded step of more rows, in an order of its own."""
    whole = make_batch([1500, 20, 700, 0], head_dim=16, kv_heads=1)
    alone = replace(
        whole, query=whole.query[:1], block_tables=whole.block_tables[:1],
        context_lens=whole.context_lens[:1], query_lens=whole.query_lens[:1],
    )  # fmt: skip
    rows, lens, tables, order = (
        whole.tensor(x) for x in (range(4), whole.context_lens, whole.block_tables, [0, 2, 1, 3])
    )
    recorded = backend.decode_metadata(rows, lens, tables, 40_960, order)
    together = attend_by(backend, whole)
    assert torch.equal(attend_by(backend, alone), together[:1])
    assert torch.equal(attend_by(backend, whole, recorded), together)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [2, 3, 4])
def test_two_heads_of_a_group_that_share_a_program_keep_their_sinks_and_slopes(
    backend: TritonBackend, group: int, dtype: torch.dtype
) -> None:
    """A whole prompt, chunks behind cached contexts and decodes; three heads of a group share no program."""
    batch = make_batch(
        [90, 130, 97, 300], [90, 50, 2, 1], head_dim=32, group=group, dtype=dtype,
        window=21, chunk=64, soft_cap=1.5, has_sinks=True, has_slopes=True,
    )  # fmt: skip
    assert batch.error(attend_by(backend, batch)) < TOLERANCE[dtype]


def test_auto_does_not_take_it_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the interpreter could run the kernels: it is for tests."""
    assert not isinstance(load_backend("auto", torch.device("cpu")), TritonBackend)
    assert caplog.text == ""


def test_without_triton_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.attention, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install triton"):
        load_backend("triton", torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "serves"), [((8, 0), False), ((8, 9), True), ((9, 0), True)]
)
def test_fp8_is_refused_where_triton_cannot_compile_it(
    capability: tuple[int, int], serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded: an A100 would raise Triton's own error at the first launch."""
    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], name="a GPU", multi_processor_count=8
    )
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(engine.attention, "find_spec", lambda name: True)
    cuda = torch.device("cuda")
    assert isinstance(load_backend("triton", cuda, torch.bfloat16), TritonBackend)
    if serves:
        load_backend("triton", cuda, torch.bfloat16, "fp8_e4m3")
        return
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype='fp8_e4m3': .* 8.9, a GPU has 8.0; use 'torch'"
    ):
        load_backend("auto", cuda, torch.bfloat16, "fp8_e4m3")
