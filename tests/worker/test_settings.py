"""Settings that cannot be used stop the start and name what to change."""

from __future__ import annotations

import logging
from io import StringIO
from pathlib import Path

import pytest

from engine import ConfigError, ModelIdentity
from engine.run.machine import device
from engine.run.machine.device import resolve_device
from worker.errors import FunctionNotFound, SettingsError
from worker.settings import WorkerSettings, name_variables, with_variables
from worker.start.imports import load_functions


def test_an_env_file_that_is_no_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_bytes(b"\x80TOKENMILL_MODEL=m")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"\.env cannot be read .*UTF-8"):
        WorkerSettings.load()


def load(monkeypatch: pytest.MonkeyPatch, folder: Path, **variables: str) -> WorkerSettings:
    """Load the settings in a folder with these variables and a model."""
    monkeypatch.chdir(folder)
    for name, value in {"TOKENMILL_MODEL": "m", **variables}.items():
        monkeypatch.setenv(name, value)
    return WorkerSettings.load()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("TOKENMILL_MAX_NUM_SEQ", r"MAX_NUM_SEQ is no setting: did you mean TOKENMILL_MAX_NUM_SEQS\?"),
        ("tokenmill_folder_of_mine", "TOKENMILL_FOLDER_OF_MINE is no setting: docs/operator.md lists them"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest_name(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=says):
        load(monkeypatch, tmp_path, **{name: "1"})


def test_a_misspelt_variable_in_a_shared_env_file_is_refused_and_other_programs_keys_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("DATABASE_URL=x\nTOKENMILL_PREFETCH=7\n")
    assert load(monkeypatch, tmp_path).prefetch == 7
    (tmp_path / ".env").write_text("DATABASE_URL=x\nTOKENMILL_PREFTECH=7\n")
    with pytest.raises(SettingsError, match="did you mean TOKENMILL_PREFETCH"):
        load(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("4GiB", 4 << 30), ("512MB", 512_000_000), ("64 MiB", 64 << 20), ("4096", 4096)]
)
def test_a_size_may_carry_its_unit(
    text: str, num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(monkeypatch, tmp_path, TOKENMILL_KV_CACHE_BYTES=text, TOKENMILL_MAX_JOB_BYTES=text)
    assert settings.engine_config().kv_cache_bytes == settings.max_job_bytes == num_bytes


def test_the_kv_caches_dtype_reaches_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(monkeypatch, tmp_path).engine_config().kv_cache_dtype == "auto"
    settings = load(monkeypatch, tmp_path, TOKENMILL_KV_CACHE_DTYPE="fp8_e4m3")
    assert settings.engine_config().kv_cache_dtype == "fp8_e4m3"


@pytest.mark.parametrize("name", ["DTYPE", "QUANTIZATION", "KV_CACHE_DTYPE", "MAX_MODEL_LEN", "DEVICE"])
def test_an_empty_variable_is_refused_as_empty(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=f"TOKENMILL_{name}='': it is empty: give it a value, or unset"):
        load(monkeypatch, tmp_path, **{f"TOKENMILL_{name}": ""})


def test_an_empty_list_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(monkeypatch, tmp_path, TOKENMILL_ALLOWED_FUNCTIONS="").allowed_functions == ()


def test_the_engines_log_names_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler(StringIO())
    logger = logging.Logger("engine")
    logger.addHandler(handler)
    name_variables(logger)
    name_variables(logger)
    logger.warning("dtype=%r is slower; set max_model_len=%d", "float16", 512)
    told = "TOKENMILL_DTYPE='float16' is slower; set TOKENMILL_MAX_MODEL_LEN=512\n"
    assert handler.stream.getvalue() == told


@pytest.mark.parametrize("text", ["4 gigs", "-1", "GiB", "1e3"])
def test_a_size_that_is_none_names_its_variable(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=r"TOKENMILL_KV_CACHE_BYTES=.*such as 4194304, 512MB or 4GiB"):
        load(monkeypatch, tmp_path, TOKENMILL_KV_CACHE_BYTES=text)


def test_a_root_that_is_no_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"^TOKENMILL_DATA_ROOTS='/nowhere': '/nowhere' is not a folder$"):
        load(monkeypatch, tmp_path, TOKENMILL_DATA_ROOTS="/nowhere")


def test_object_stores_stand_among_the_folders_of_the_data_roots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("obstore", reason="the extra `cloud` is not installed")
    stores = ["s3://bucket/a b", "gs://bucket", "az://container/x"]
    roots = ":".join([str(tmp_path), "S3://bucket/a b/", *stores[1:], "/"])
    assert load(monkeypatch, tmp_path, TOKENMILL_DATA_ROOTS=roots).data_roots == (str(tmp_path), *stores, "/")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3x").mkdir()
    assert load(monkeypatch, tmp_path, TOKENMILL_DATA_ROOTS="s3x://").data_roots == (
        str(tmp_path / "s3x"),
        "/",
    )
    with pytest.raises(SettingsError, match="is no object's path"):
        load(monkeypatch, tmp_path, TOKENMILL_DATA_ROOTS="s3://bucket/a?key")


@pytest.mark.parametrize("name", ["jobs.mine.f", "worker.tasks.f", "engine.f"])
def test_a_function_in_a_package_of_our_names_is_refused_with_the_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=rf"TOKENMILL_ALLOWED_FUNCTIONS.*'{name}'.*Tokenmill's own"):
        load(monkeypatch, tmp_path, TOKENMILL_ALLOWED_FUNCTIONS=f"jobs.complete,{name}")


@pytest.mark.parametrize("name", ["mine", "mine.", ".mine"])
def test_a_module_in_the_place_of_a_function_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=r"ALLOWED_FUNCTIONS.*names no function.*module\.function"):
        load(monkeypatch, tmp_path, TOKENMILL_ALLOWED_FUNCTIONS=name)
    with pytest.raises(FunctionNotFound, match=r"'os\.path'.*it is a module, expected a function"):
        load_functions(["os.path"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("dtype='half' cannot be used", "TOKENMILL_DTYPE='half' cannot be used"),
        ("seed must be an integer", "TOKENMILL_SEED must be an integer"),
        (
            "max_num_batched_tokens=8 must exceed max_num_seqs=9",
            "TOKENMILL_MAX_NUM_BATCHED_TOKENS=8 must exceed TOKENMILL_MAX_NUM_SEQS=9",
        ),
        (
            "the pool has no room; lower kv_cache_bytes",
            "the pool has no room; lower TOKENMILL_KV_CACHE_BYTES",
        ),
        ("chat_template='a' is no template", "TOKENMILL_CHAT_TEMPLATE='a' is no template"),
        ("/m/config.json: dtype must be a text", "/m/config.json: dtype must be a text"),
        ("TOKENMILL_MODEL='x': no model folder", "TOKENMILL_MODEL='x': no model folder"),
    ],
)
def test_what_the_engine_refuses_is_told_by_its_variable(text: str, told: str) -> None:
    assert with_variables(text) == told


def test_a_device_that_is_none_is_told_by_its_variable() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_device("gpu!")
    assert with_variables(str(caught.value)).startswith("TOKENMILL_DEVICE='gpu!' is no torch device")


@pytest.mark.parametrize("sign", ["driver", "nvidia0", "nvidia-smi"])
def test_a_gpu_that_torch_cannot_use_is_no_cpu_in_silence(
    sign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the CPU is asked for, or the GPU hidden."""
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(device, "DEVICES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert resolve_device("auto").type == "cpu"
    (tmp_path / sign).write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    (tmp_path / sign).chmod(0o755)
    with pytest.raises(ConfigError, match=f"there is a GPU .*{sign}.* and torch .* cannot use it") as caught:
        resolve_device("auto")
    assert "set TOKENMILL_DEVICE=cpu to compute on the CPU" in with_variables(str(caught.value))
    assert resolve_device("cpu").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto").type == "cpu"


@pytest.mark.parametrize("told", ["TOKENMILL_TORCH_THREADS", "OMP_NUM_THREADS"])
def test_a_number_of_threads_that_was_set_stays(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert load(monkeypatch, tmp_path).engine_config().adapt_cpu_threads
    assert not load(monkeypatch, tmp_path, **{told: "2"}).engine_config().adapt_cpu_threads


def test_a_served_name_stands_in_answers_and_the_models_own_names_are_known_besides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOKENMILL_MODEL", str(tmp_path))
    monkeypatch.setenv("TOKENMILL_SERVED_NAME", "our-model")
    served = WorkerSettings.load().served_model(ModelIdentity("f" * 64, "float32"))
    assert served.name == "our-model"
    assert set(served.names) == {"our-model", str(tmp_path), str(tmp_path.resolve()), tmp_path.name, "f" * 64}
