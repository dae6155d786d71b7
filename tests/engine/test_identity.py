"""Two engines have one identity exactly when they serve the same model with settings that answer alike."""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import EngineConfig, MissingWeights, ModelIdentity, model_identity
from engine.checkpoint.fingerprint import ANSWERS_VERSION
from tests.engine.checkpoints import shard
from tests.engine.families import Family, longrope, make_family
from worker.settings import WorkerSettings


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["gqa1_untied"], tmp_path / "copy"))


def fingerprint(folder: Path, dtype: str = "auto") -> str:
    return model_identity(EngineConfig(str(folder), dtype=dtype)).fingerprint


def test_a_copy_in_another_folder_or_in_shards_is_the_same_model(
    folders: dict[str, Path], copy: Path
) -> None:
    original = fingerprint(folders["gqa1_untied"])
    assert fingerprint(copy) == original
    shard(copy)
    assert fingerprint(copy) == original


def test_a_dtype_is_another_model_and_auto_is_the_checkpoints_own(copy: Path) -> None:
    assert fingerprint(copy) == fingerprint(copy, "float32") != fingerprint(copy, "bfloat16")
    assert model_identity(EngineConfig(str(copy), dtype="bfloat16")).dtype == "bfloat16"


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"),
        *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    ],
)
def test_configuration_tokenizer_template_and_processor_count(copy: Path, name: str) -> None:
    before, path = fingerprint(copy), copy / name
    path.write_text((path.read_text() if path.exists() else "") + "\n")
    assert fingerprint(copy) != before


def test_a_change_of_the_code_that_changes_answers_is_another_model(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(copy)
    monkeypatch.setattr("engine.checkpoint.fingerprint.ANSWERS_VERSION", ANSWERS_VERSION + 1)
    assert fingerprint(copy) != before


def test_files_that_the_engine_does_not_read_do_not_count(copy: Path) -> None:
    before = fingerprint(copy)
    (copy / "README.md").write_text("x")
    (copy / "trainer_state.json").write_text(json.dumps({"step": 1}))
    assert fingerprint(copy) == before


def nudge(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][-1] += 1e-3


def train(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.embed_tokens.weight"
    assert tensors[name].nbytes > 1 << 16, "read in samples"
    tensors[name] *= 1.001


@pytest.mark.parametrize("change", [nudge, train])
def test_a_small_tensor_counts_to_its_last_value_and_training_of_a_large_one_is_found(
    copy: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    before = fingerprint(copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(copy) != before


def test_a_truncated_file_is_refused(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(MissingWeights, match="its header names"):
        fingerprint(copy)


ORIGINAL = 32
SUMS = "it changes the order of sums alone, as other rows of a batch do"
LIMITS = "it bounds the length alone, which a run pins beside the fingerprint"


#: For each setting values of which no two may have one identity, or why none changes an answer.
SETTINGS: dict[str, list[dict[str, Any]] | str] = {
    "model": "its files are read",
    "dtype": [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float16"}],
    "device": SUMS,
    "max_model_len": [
        {"max_model_len": ORIGINAL},
        {"max_model_len": ORIGINAL + 1},
        {"max_model_len": ORIGINAL, "kv_cache_dtype": "fp8_e4m3"},
        {"max_model_len": ORIGINAL - 1, "kv_cache_dtype": "fp8_e4m3"},
    ],
    "max_num_seqs": SUMS,
    "max_num_batched_tokens": [
        {"max_num_batched_tokens": number, "max_num_seqs": 8, "kv_cache_dtype": "fp8_e4m3"}
        for number in (40, 41)
    ],
    "block_size": SUMS,
    "kv_cache_bytes": LIMITS,
    "kv_cache_dtype": [{}, {"kv_cache_dtype": "fp8_e4m3"}],
    "memory_utilization": LIMITS,
    "enable_prefix_caching": SUMS,
    "tensor_parallel_size": SUMS,
    "attention_backend": SUMS,
    "model_path": SUMS,
    "quantization": [{}, {"quantization": "int8"}],
    "enforce_eager": SUMS,
    "async_scheduling": "a step's work is the same whenever it is scheduled",
    "seed": [
        {"deterministic": True},
        {"deterministic": True, "seed": 1},
    ],  # else seeds are drawn by chance
    "chat_template": [{}, {"chat_template": "tool_use"}],
    "deterministic": [{}, {"deterministic": True}],
    "adapt_cpu_threads": SUMS,
    "pooling": [{}, {"pooling": "mean"}, {"pooling": "lasttoken"}],
    "adapters": "a request that names one is pinned to its files",
    "max_adapters": LIMITS,
    "kernel_check": SUMS,
}


#: Settings of a worker that its engine is not told.
BESIDE_THE_ENGINE = {
    "data_roots", "allowed_functions", "allowed_webhook_hosts", "max_job_bytes", "max_held_bytes",
    "max_result_bytes", "answer_memo_bytes", "max_shard_bytes", "max_worker_deaths", "lease_s", "prefetch",
    "function_threads", "function_grace_s", "file_timeout_s", "check_timeout_s", "drain_s", "journal_s",
    "max_stuck_threads", "metrics_port", "metrics_host", "traces", "log_format", "served_name",
    "torch_threads",  # which is torch's own: SUMS
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose factors change beyond ORIGINAL tokens."""
    family = Family("short_and_long", "phi3", longrope(ORIGINAL))
    return make_family(tmp_path_factory.mktemp("longrope") / "model", family)


def identity(folder: Path, **values: Any) -> ModelIdentity:
    return model_identity(EngineConfig(str(folder), **{"dtype": "float32", **values}))


def test_every_setting_of_the_engine_says_whether_it_changes_an_answer(folder: Path) -> None:
    assert set(SETTINGS) == {field.name for field in fields(EngineConfig)}
    for name, cases in SETTINGS.items():
        if not isinstance(cases, str):
            found = {identity(folder, **values).fingerprint for values in cases}
            assert len(found) == len(cases), name


@pytest.mark.parametrize(
    "values",
    [
        {"device": "cpu"}, {"max_num_seqs": 8}, {"max_num_batched_tokens": 600}, {"block_size": 32},
        {"kv_cache_bytes": 1 << 20}, {"memory_utilization": 0.5}, {"enable_prefix_caching": False},
        {"tensor_parallel_size": 2}, {"attention_backend": "torch"}, {"model_path": "native"},
        {"enforce_eager": True}, {"async_scheduling": True}, {"seed": 1}, {"adapt_cpu_threads": True},
        {"max_model_len": 2 * ORIGINAL},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_no_answer_leaves_the_model_what_it_is(
    folder: Path, values: dict[str, Any]
) -> None:
    assert identity(folder, **values) == identity(folder)


def test_the_length_that_an_engine_takes_is_pinned_beside_the_fingerprint(folder: Path) -> None:
    settings = WorkerSettings(model=str(folder))
    served = [settings.served_model(identity(folder), "", length) for length in (32, 64)]
    assert served[0].fingerprint == served[1].fingerprint
    assert served[0].pin != served[1].pin
    assert served[0].pinned(0.0).pin == served[0].pin in served[0].names


def test_every_setting_of_a_worker_reaches_the_engine_or_does_not() -> None:
    of_the_engine = set(SETTINGS) - {"adapt_cpu_threads"}
    assert set(WorkerSettings.model_fields) == of_the_engine | BESIDE_THE_ENGINE
