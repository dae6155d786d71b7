"""Settings that cannot be used stop the start and name what to change."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import ConfigError, ModelIdentity
from engine.run import device
from engine.run.device import resolve_device
from worker.errors import FunctionNotFound, SettingsError
from worker.settings import WorkerSettings, with_variables
from worker.start import load_functions


def load(monkeypatch: pytest.MonkeyPatch, folder: Path, **variables: str) -> WorkerSettings:
    """Load the settings in a folder with these variables and a model."""
    monkeypatch.chdir(folder)
    for name, value in {"TOKENMILL_MODEL": "m", **variables}.items():
        monkeypatch.setenv(name, value)
    return WorkerSettings.load()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MAX_NUM_SEQ", "1", r"MAX_NUM_SEQ is no setting: did you mean TOKENMILL_MAX_NUM_SEQS\?"),
        (
            "FOLDER_OF_MINE",
            "1",
            "TOKENMILL_FOLDER_OF_MINE is no setting: docs/operator.md lists the settings",
        ),
        ("MAX_NUM_SEQS", "many", "TOKENMILL_MAX_NUM_SEQS='many'"),
        ("LEASE_S", "0", "TOKENMILL_LEASE_S='0'"),
        ("MODEL", "", "TOKENMILL_MODEL"),
        ("DTYPE", "", "TOKENMILL_DTYPE='': it is empty: give it a value, or unset"),
        ("KV_CACHE_BYTES", "4 gigs", "TOKENMILL_KV_CACHE_BYTES=.*such as 4194304, 512MB or 4GiB"),
        (
            "DATA_ROOTS",
            "/nowhere",
            "^TOKENMILL_DATA_ROOTS='/nowhere': '/nowhere' is not a folder: create it,",
        ),
        ("ALLOWED_FUNCTIONS", "mine", r"ALLOWED_FUNCTIONS.*names no function.*module\.function"),
        ("ALLOWED_FUNCTIONS", "jobs.mine.f", "ALLOWED_FUNCTIONS.*'jobs.mine.f'.*Tokenmill's own"),
        ("METRICS_PORT", "9466-9464", "TOKENMILL_METRICS_PORT"),
        ("METRICS_PORT", "70000", "TOKENMILL_METRICS_PORT"),
        ("METRICS_PORT", "abc", "TOKENMILL_METRICS_PORT='abc': expected a port"),
        ("TRACES", "some", "'off', 'producers' or 'all'"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(
    name: str, value: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=says):
        load(monkeypatch, tmp_path, **{f"TOKENMILL_{name}": value})


def test_ports_are_one_or_several_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, ports in (("0", range(0)), ("9464-9466", range(9464, 9467))):
        assert load(monkeypatch, tmp_path, TOKENMILL_METRICS_PORT=text).metrics_port == ports


def test_a_misspelt_variable_in_a_shared_env_file_is_refused_and_other_programs_keys_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("DATABASE_URL=x\nTOKENMILL_PREFETCH=7\n")
    assert load(monkeypatch, tmp_path).prefetch == 7
    (tmp_path / ".env").write_text("DATABASE_URL=x\nTOKENMILL_PREFTECH=7\n")
    with pytest.raises(SettingsError, match="did you mean TOKENMILL_PREFETCH"):
        load(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 4 << 30), ("512MB", 512_000_000), ("64 MiB", 64 << 20), ("4096", 4096)],
)
def test_a_size_may_carry_its_unit(
    text: str, num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(
        monkeypatch, tmp_path, TOKENMILL_KV_CACHE_BYTES=text, TOKENMILL_MAX_JOB_BYTES=text
    )
    assert settings.engine_config().kv_cache_bytes == settings.max_job_bytes == num_bytes


def test_object_stores_stand_among_the_folders_of_the_data_roots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("obstore", reason="the extra `cloud` is not installed")
    stores = ["s3://bucket/a b", "gs://bucket", "az://container/x"]
    roots = ":".join([str(tmp_path), "S3://bucket/a b/", *stores[1:], "/"])
    assert load(monkeypatch, tmp_path, TOKENMILL_DATA_ROOTS=roots).data_roots == (
        str(tmp_path),
        *stores,
        "/",
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3x").mkdir()
    assert load(monkeypatch, tmp_path, TOKENMILL_DATA_ROOTS="s3x://").data_roots == (
        str(tmp_path / "s3x"),
        "/",
    )
    with pytest.raises(SettingsError, match="is no object's path"):
        load(monkeypatch, tmp_path, TOKENMILL_DATA_ROOTS="s3://bucket/a?key")


def test_a_module_in_the_place_of_a_function_is_refused() -> None:
    with pytest.raises(FunctionNotFound, match=r"'os\.path'.*it is a module, expected a function"):
        load_functions(["os.path"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("dtype='half' cannot be used", "TOKENMILL_DTYPE='half' cannot be used"),
        (
            "max_num_batched_tokens=8 must exceed max_num_seqs=9",
            "TOKENMILL_MAX_NUM_BATCHED_TOKENS=8 must exceed TOKENMILL_MAX_NUM_SEQS=9",
        ),
        ("/m/config.json: dtype must be a text", "/m/config.json: dtype must be a text"),
        ("TOKENMILL_MODEL='x': no model folder", "TOKENMILL_MODEL='x': no model folder"),
        ("no pooling; add it, or set pooling", "no pooling; add it, or set TOKENMILL_POOLING"),
        ("or leave deterministic out", "or leave TOKENMILL_DETERMINISTIC out"),
        ("the model's dtype; try another dtype", "the model's dtype; try another TOKENMILL_DTYPE"),
    ],
)
def test_what_the_engine_refuses_is_told_by_its_variable(text: str, told: str) -> None:
    assert with_variables(text) == told


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
    with pytest.raises(
        ConfigError, match=f"there is a GPU .*{sign}.* and torch .* cannot use it"
    ) as caught:
        resolve_device("auto")
    assert "set TOKENMILL_DEVICE=cpu to compute on the CPU" in with_variables(str(caught.value))
    assert resolve_device("cpu").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto").type == "cpu"


@pytest.mark.parametrize(("gib", "num_seqs"), [(24, 256), (80, 1024)])
def test_a_large_gpu_runs_more_sequences_at_once(
    gib: int, num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        device.torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(total_memory=gib << 30),
    )
    monkeypatch.setenv("TOKENMILL_MODEL", "some/model")
    assert WorkerSettings.load().engine_config().num_seqs == num_seqs
    monkeypatch.setenv("TOKENMILL_DEVICE", "cpu")
    assert WorkerSettings.load().engine_config().num_seqs == 256
    monkeypatch.setenv("TOKENMILL_MAX_NUM_BATCHED_TOKENS", "200")
    assert WorkerSettings.load().engine_config().num_seqs == 100
    monkeypatch.setenv("TOKENMILL_MAX_NUM_SEQS", "150")
    assert WorkerSettings.load().engine_config().num_seqs == 150


def test_a_served_name_stands_in_answers_and_the_models_own_names_are_known_besides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOKENMILL_MODEL", str(tmp_path))
    monkeypatch.setenv("TOKENMILL_SERVED_NAME", "our-model")
    served = WorkerSettings.load().served_model(ModelIdentity("f" * 64, "float32"))
    assert served.name == "our-model"
    assert set(served.names) == {
        "our-model",
        str(tmp_path),
        str(tmp_path.resolve()),
        tmp_path.name,
        "f" * 64,
    }
