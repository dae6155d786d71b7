"""GPU kernels are compared with plain torch before a start, and a wrong one is named."""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine import ConfigError, EngineConfig
from engine.attention import triton_backend
from engine.attention.triton_backend import TritonBackend
from engine.checkpoint.model_config import read_model_config
from engine.errors import KernelCheckFailed, KernelDiffers
from engine.kernels.attention import decode as decode_kernels
from engine.kernels.attention.decode import DecodeRows
from engine.kernels.attention.prefix import PREFIX_TILE
from engine.kernels.products import low_rank
from engine.models.load import choose_path
from engine.run.forward.checks import checked_kernels
from engine.run.forward.checks import kernel_check as kernel_check_of_start
from engine.run.forward.checks.checked_kernels import check_kernels
from engine.run.forward.checks.comparison import KernelComparison
from engine.run.forward.checks.kernel_check import (
    CheckedModel,
    KernelFault,
    find_fault,
    with_checked_kernels,
)
from engine.sampling.logit_edits import LogitEdits
from ops.bench.static.kernel_cases import KERNELS
from tests.engine.launches import record_launches
from tests.engine.quantizers import bnb4_config

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300, "num_hidden_layers": 2, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
}  # fmt: skip
DELTA = {
    "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {},
    "Gemma2ForCausalLM": {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 64},
    "GptOssForCausalLM": {"num_local_experts": 4, "intermediate_size": 32},
    "Qwen3_5ForCausalLM": DELTA,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels run on the GPU here, as ops.bench.gpu has them"
)


def write_model(
    folder: Path, architecture: str = "Qwen3ForCausalLM", quantization: dict[str, Any] | None = None
) -> CheckedModel:
    """Write a checkpoint's config.json, and describe the model as the interpreter would run it."""
    values = {"architectures": [architecture], **SIZES, **MODELS[architecture]}
    if quantization is not None:
        values["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(values))
    return CheckedModel(
        folder=str(folder),
        device="cpu",
        dtype="float32",
        kv_cache_dtype="auto",
        block_size=16,
        tensor_parallel_size=1,
    )


@needs_interpreter
@pytest.mark.long
@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype"),
    [("auto", "float32"), ("auto", "bfloat16"), ("fp8_e4m3", "bfloat16")],
)
@pytest.mark.parametrize("architecture", MODELS)
def test_kernels_that_work_pass(
    tmp_path: Path, architecture: str, kv_cache_dtype: str, dtype: str
) -> None:
    model = write_model(tmp_path, architecture)
    check_kernels(replace(model, dtype=dtype, kv_cache_dtype=kv_cache_dtype), lambda name: None)


@needs_interpreter
@pytest.mark.parametrize(
    ("kernel", "sabotage"),
    [
        ("attention", "last token left out"),
        ("attention", "scale"),
        ("attention", "order of a recorded step"),
        ("attention to a common prefix", "last tile of a prefix left out"),
        ("attention of prompts behind a common prefix", "one tile more of a prefix"),
        ("norm of a sum", "weight"),
        ("SiLU", "does not compile"),
        ("scores of tokens", "rank"),
        ("scores of tokens", "log probability"),
        ("edits of logits", "presence"),
        ("edits of logits", "ban behind a token"),
        ("edits of logits", "pending tokens"),
        ("writing rows of a recorded step", "block tables left out"),
        ("inputs of a recorded step", "slots of smaller blocks"),
    ],
)
def test_a_wrong_kernel_is_the_last_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, sabotage: str
) -> None:
    patch_kernels(monkeypatch, sabotage)
    named: list[str] = []

    with pytest.raises((KernelDiffers, ZeroDivisionError)):
        check_kernels(write_model(tmp_path), named.append)

    assert named[-1] == kernel


@needs_interpreter
@pytest.mark.parametrize(
    ("section", "takes"),
    [
        (AWQ, lambda scales, zeros: (scales, zeros + 1)),
        (bnb4_config("nf4"), lambda scales, zeros: (scales.roll(1, 1), zeros)),
        (bnb4_config("fp4"), lambda scales, zeros: (scales.roll(1, 1), zeros)),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            lambda scales, zeros: (scales.roll(1, 1), zeros),
        ),
    ],
    ids=["awq", "bnb_nf4", "bnb_fp4", "bnb_int8"],
)
def test_products_with_packed_weights_are_checked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: dict[str, Any],
    takes: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> None:
    """A right one passes, and one that takes another zero point, or another row's scale, is named."""
    model = write_model(tmp_path, quantization=section)
    right = triton_backend.PACKED
    named: list[str] = []
    is_of_bitsandbytes = section["quant_method"] == "bitsandbytes"

    def product(x: Any, words: Any, scales: Any, zeros: Any, *rest: Any) -> Any:
        assert scales.dtype == (torch.float32 if is_of_bitsandbytes else torch.float16)
        if named.count("products with packed weights") == 4:
            scales, zeros = takes(scales, zeros)
        return right.product(x, words, scales, zeros, *rest)

    monkeypatch.setattr(triton_backend, "PACKED", replace(right, product=product))
    with pytest.raises(KernelDiffers):
        check_kernels(model, named.append)
    assert named[-4:] == ["products with packed weights"] * 4


@needs_interpreter
def test_products_of_experts_with_packed_weights_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right one passes, and one that takes another expert's scales is named. Scales are MXFP4's: powers of two."""
    model = write_model(tmp_path, "GptOssForCausalLM", {"quant_method": "mxfp4"})
    right = triton_backend.PACKED
    assert right.grouped_product is not None
    multiply = right.grouped_product
    name = "products of experts with packed weights"
    named: list[str] = []

    def product(x: Any, words: Any, scales: Any, *rest: Any) -> Any:
        assert (scales.float().frexp().mantissa == 0.5).all()
        is_last = named.count(name) == 6
        return multiply(x, words, scales.roll(int(is_last), 0), *rest)

    monkeypatch.setattr(triton_backend, "PACKED", replace(right, grouped_product=product))
    with pytest.raises(KernelDiffers):
        check_kernels(model, named.append)
    assert [each for each in named if each == name] == [name] * 6


@needs_interpreter
def test_products_of_adapters_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right one passes, and one whose factor is another is named."""
    model = replace(write_model(tmp_path), has_adapters=True)
    monkeypatch.setattr(checked_kernels, "ADAPTER_ROWS", (3, 40))
    name = "products of adapters"
    named: list[str] = []

    def add(y: Any, x: Any, rows: Any, table: Any) -> None:
        is_last = named.count(name) == 3
        low_rank.add_low_rank(y, x, rows, table._replace(scales=table.scales * (1 + is_last)))

    monkeypatch.setattr(triton_backend, "add_low_rank", add)
    with pytest.raises(KernelDiffers):
        check_kernels(model, named.append)
    assert named.count(name) == 3


def patch_kernels(monkeypatch: pytest.MonkeyPatch, sabotage: str) -> None:
    """Make one kernel of the Triton backend wrong."""
    decode, add_rms_norm = triton_backend.decode_attention, triton_backend.add_rms_norm
    score_tokens = triton_backend.score_tokens
    edit_logits = triton_backend.edit_logits
    write_rows, advance_rows = triton_backend.write_rows, triton_backend.advance_rows
    attend_to_prefixes = decode_kernels.attend_to_prefixes
    attend_to_shared_tiles = triton_backend.shared_prefill_attention

    def without_last_tile(query: Any, cache: Any, prefixes: Any, *rest: Any, **kind: Any) -> None:
        prefixes.begins.sub_(PREFIX_TILE)
        attend_to_prefixes(query, cache, prefixes, *rest, **kind)
        prefixes.begins.add_(PREFIX_TILE)

    def with_one_tile_more(query: Any, cache: Any, tiles: Any, *rest: Any, **kind: Any) -> None:
        longer = replace(tiles, num_shared=tiles.num_shared + PREFIX_TILE)
        attend_to_shared_tiles(query, cache, longer, *rest, **kind)

    def without_last_token(
        query: Any, cache: Any, rows: DecodeRows, *rest: Any, **kind: Any
    ) -> None:
        decode(query, cache, replace(rows, context_lens=rows.context_lens - 1), *rest, **kind)

    def with_another_order(
        query: Any, cache: Any, rows: DecodeRows, *rest: Any, **kind: Any
    ) -> None:
        if rows.order is not None:
            rows = replace(rows, order=rows.order.new_zeros(len(rows.order)))
        decode(query, cache, rows, *rest, **kind)

    def with_other_scale(*arguments: Any, **kind: Any) -> None:
        decode(*arguments, **{**kind, "scale": kind["scale"] * 1.5})

    def with_other_weight(x: Any, residual: Any, weight: Any, eps: float) -> Any:
        return add_rms_norm(x, residual, weight * 1.1, eps)

    def with_other_rank(*arguments: Any) -> Any:
        logprobs, ranks, totals = score_tokens(*arguments)
        return logprobs, ranks + 1, totals

    def with_other_log_probability(*arguments: Any) -> Any:
        logprobs, ranks, totals = score_tokens(*arguments)
        return logprobs + 0.001, ranks, totals

    def with_edits(change: Callable[[LogitEdits], LogitEdits]) -> Callable[..., Any]:
        return lambda logits, edits, sampled: edit_logits(logits, change(edits), sampled)

    def without_presence(edits: LogitEdits) -> LogitEdits:
        return replace(edits, penalties=edits.penalties * np.array([0, 1, 1], np.float32))

    def without_bans_behind(edits: LogitEdits) -> LogitEdits:
        return replace(edits, banned_behind=edits.banned_behind[:0])

    def without_pending(edits: LogitEdits) -> LogitEdits:
        return replace(edits, pending=edits.pending[:0])

    def without_block_tables(memory: Any, writes: Any, sampled: Any) -> None:
        write_rows(memory, [*writes[:4], writes[4][:0], writes[5][:0], writes[6]], sampled)

    def with_smaller_blocks(*arguments: Any, block_size: int) -> None:
        advance_rows(*arguments, block_size=block_size // 2)

    def does_not_compile(gate_up: Any) -> Any:
        raise ZeroDivisionError

    patches: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "last token left out": (triton_backend, "decode_attention", without_last_token),
        "scale": (triton_backend, "decode_attention", with_other_scale),
        "order of a recorded step": (triton_backend, "decode_attention", with_another_order),
        "last tile of a prefix left out": (decode_kernels, "attend_to_prefixes", without_last_tile),
        "one tile more of a prefix": (
            triton_backend,
            "shared_prefill_attention",
            with_one_tile_more,
        ),
        "weight": (triton_backend, "add_rms_norm", with_other_weight),
        "does not compile": (triton_backend, "silu_and_mul", does_not_compile),
        "rank": (triton_backend, "score_tokens", with_other_rank),
        "log probability": (triton_backend, "score_tokens", with_other_log_probability),
        "presence": (triton_backend, "edit_logits", with_edits(without_presence)),
        "ban behind a token": (triton_backend, "edit_logits", with_edits(without_bans_behind)),
        "pending tokens": (triton_backend, "edit_logits", with_edits(without_pending)),
        "block tables left out": (triton_backend, "write_rows", without_block_tables),
        "slots of smaller blocks": (triton_backend, "advance_rows", with_smaller_blocks),
    }
    monkeypatch.setattr(*patches[sabotage])


def child(body: str) -> tuple[str, ...]:
    """The command of a child that names a kernel, and then does something."""
    return sys.executable, "-c", f"import os, sys, time; print('attention', flush=True); {body}"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("os.kill(os.getpid(), 11)", f"its process ended with {signal.SIGSEGV.name}"),
        ("raise ValueError('no such instruction')", "ValueError: no such instruction"),
        ("time.sleep(60)", "it did not end within 0.5 s"),
    ],
)
def test_a_child_that_ends_badly_says_which_kernel_was_the_last(
    tmp_path: Path, body: str, problem: str
) -> None:
    fault = find_fault(write_model(tmp_path), child(body), timeout_s=0.5 if "60" in body else 60)
    assert fault == KernelFault("attention", problem)


@pytest.mark.processes
def test_a_child_without_memory_accuses_no_kernel(tmp_path: Path) -> None:
    fault = find_fault(
        write_model(tmp_path),
        child("print('torch.OutOfMemoryError: CUDA out of memory', file=sys.stderr); sys.exit(1)"),
    )
    assert fault == KernelFault(None, "torch.OutOfMemoryError: CUDA out of memory")


@needs_interpreter
@pytest.mark.long
def test_the_child_itself_passes_and_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert find_fault(write_model(tmp_path)) is None


#: Replaces our kernel by a real one that is wrong, and then is the child.
SABOTAGED_CHILD = """
import triton
import triton.language as tl
from engine.attention import triton_backend
from engine.run.forward.checks.checked_kernels import main


@triton.jit
def names_nothing(x_ptr):
    tl.store(x_ptr, no_such_name)


@triton.jit
def reads_far_away(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr + (1 << 44)))


def add_rms_norm(x, residual, weight, eps):
    {kernel}[(1,)](x)
    return x, residual


triton_backend.add_rms_norm = add_rms_norm
main()
"""


@needs_interpreter
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        ("names_nothing", "InterpreterError: NameError"),
        ("reads_far_away", f"its process ended with {signal.SIGSEGV.name}"),
    ],
)
def test_the_child_names_a_kernel_that_does_not_compile_or_faults(
    tmp_path: Path, kernel: str, problem: str
) -> None:
    child = tmp_path / "child.py"
    child.write_text(SABOTAGED_CHILD.format(kernel=kernel))
    fault = find_fault(write_model(tmp_path), (sys.executable, str(child)))
    assert fault is not None
    assert "norm" in str(fault.kernel)
    assert problem in fault.problem


def test_a_check_counts_for_one_device_software_and_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change of any of them the kernels are checked again."""
    model = write_model(tmp_path)
    engine = tmp_path / "engine"
    for source in kernel_check_of_start.SOURCES:
        (engine / source).mkdir(parents=True)
        (engine / source / "kernel.py").write_text("")
    driver = tmp_path / "driver"
    driver.write_text("NVRM version: 580.1")
    device = SimpleNamespace(name="H200", major=9, minor=0)
    monkeypatch.setattr(kernel_check_of_start, "ENGINE", engine)
    monkeypatch.setattr(kernel_check_of_start, "DRIVER_VERSION", driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)

    def digest(described: CheckedModel = model) -> str:
        return kernel_check_of_start._digest(described, torch.device("cuda"))

    digests = [digest()]
    assert digest() == digests[0]
    device.name = "H100"
    digests.append(digest())
    device.minor = 1
    digests.append(digest())
    driver.write_text("NVRM version: 580.2")
    digests.append(digest())
    monkeypatch.setattr(torch, "__version__", "9.9")
    digests.append(digest())
    monkeypatch.setattr(torch.version, "cuda", "99")
    digests.append(digest())
    monkeypatch.setattr(kernel_check_of_start, "version", lambda package: f"{package} 9.9")
    digests.append(digest())
    for source in kernel_check_of_start.SOURCES:
        (engine / source / "kernel.py").write_text("changed")
        digests.append(digest())
    digests.append(digest(replace(model, dtype="bfloat16")))
    (tmp_path / "config.json").write_text("{}")
    digests.append(digest())
    assert len(set(digests)) == len(digests)


def start_config(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: KernelFault | None,
    kernel_check: str = "warn",
) -> tuple[EngineConfig, int]:
    """The configuration that an engine on a GPU would start with, and how often its kernels were checked."""
    num_checks = 0

    def check(model: CheckedModel) -> KernelFault | None:
        nonlocal num_checks
        num_checks += 1
        return fault

    write_model(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_check_of_start, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(kernel_check_of_start, "_digest", lambda model, device: "digest")
    monkeypatch.setattr(kernel_check_of_start, "find_fault", check)
    config = EngineConfig(str(tmp_path), dtype="float32", device="cpu", kernel_check=kernel_check)
    model = read_model_config(tmp_path)
    started = with_checked_kernels(config, model, choose_path(model, "auto"), tmp_path)
    return started, num_checks


def test_kernels_that_passed_are_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, num_first = start_config(tmp_path, monkeypatch, None)
    second, num_second = start_config(tmp_path, monkeypatch, None)
    assert (first.attention_backend, num_first) == ("auto", 1)
    assert (second.attention_backend, num_second) == ("auto", 0)


def test_a_fault_is_logged_and_the_torch_backend_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # a fault is not taken on trust: the next start looks again
        config, num_checks = start_config(tmp_path, monkeypatch, KernelFault("norm", "SIGSEGV"))
        assert (config.attention_backend, num_checks) == ("torch", 1)
    assert "the GPU kernel for norm does not work here: SIGSEGV" in caplog.text


def test_a_fault_ends_a_start_that_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KernelCheckFailed, match="norm does not work here"):
        start_config(tmp_path, monkeypatch, KernelFault("norm", "SIGSEGV"), "refuse")


def test_nothing_is_checked_where_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, num_checks = start_config(tmp_path, monkeypatch, KernelFault("norm", "x"), "off")
    assert (config.attention_backend, num_checks) == ("auto", 0)


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="kernel_check='maybe' must be 'warn', 'refuse' or 'off'"):
        EngineConfig("model", kernel_check="maybe")


@needs_interpreter
def test_every_kernel_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch counts only within a comparison. Only transformers' models store, and the check builds none of them."""
    launches: list[str] = []
    compared: set[str] = set()
    record_launches(monkeypatch, launches)

    def run(
        self: KernelComparison, name: str, kernel: Any, reference: Any, arguments: Any, **_: Any
    ) -> Any:
        launches.clear()
        result = kernel(*arguments)
        compared.update(launches)
        return result

    monkeypatch.setattr(KernelComparison, "run", run)
    for architecture, quantization in (
        ("Qwen3ForCausalLM", AWQ),
        ("GptOssForCausalLM", None),
        ("GptOssForCausalLM", {"quant_method": "mxfp4"}),
        ("Qwen3_5ForCausalLM", None),
    ):
        model = write_model(tmp_path, architecture, quantization)
        check_kernels(replace(model, has_adapters=True), lambda name: None)
    assert compared == set(KERNELS) - {"store_kernel"}


def test_the_backend_has_no_field_that_is_not_compared() -> None:
    """Several fields of LayerKernels may launch the same kernel, and each is compared."""
    from engine.attention.layer_kernels import ExpertKernels, LayerKernels
    from engine.run.forward.checks.checked_kernels import checked_layer_kernels

    kernels = TritonBackend(torch.device("cpu")).layer_kernels
    assert kernels is not None
    comparison = KernelComparison(lambda name: None, torch.device("cpu"), torch.float32)
    checked = checked_layer_kernels(kernels, comparison)
    assert checked.experts is not None
    assert kernels.experts is not None
    # it reads matrices by their addresses: `check_adapters` compares whole layers in its place
    by_layer = {"add_low_rank"}
    for name in LayerKernels.__dataclass_fields__.keys() - by_layer:
        kernel = getattr(kernels, name)
        assert kernel is None or getattr(checked, name) is not kernel, name
    for name in ExpertKernels.__dataclass_fields__:
        assert getattr(checked.experts, name) is not getattr(kernels.experts, name), name


def test_the_backend_overrides_nothing_that_is_not_compared() -> None:
    """A kernel that is a method of the backend is checked by name, or by steps of a small model."""
    launch_nothing = {
        "check",
        "fp8_problem",
        "share_prefixes",
        "prepare",
        "build_metadata",
        "decode_metadata",
    }
    compared = {"sample", "edit", "score", "fill_pending", "forward", "write_rows", "advance"}
    # only transformers' models store, which the check does not build
    not_compared = {"store"}
    methods = {name for name, value in vars(TritonBackend).items() if callable(value)}
    public = {name for name in methods if not name.startswith("_")}
    assert public | {"check", "fp8_problem"} == launch_nothing | compared | not_compared
