"""`tokenmill doctor` finds what is wrong with a worker's model, machine, files and settings."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine import EngineConfig, Observation, check_up
from engine.checkpoint.folder import INDEX, WHOLE
from engine.run.machine import device
from engine.run.start import check_machine
from jobs.doctor.findings import Examination, Finding, Level, examine, ok
from jobs.doctor.installation import check_installation
from jobs.doctor.places import check_places
from tests.doctor.test_redis_faults import bad
from tests.faults.mounts import MountRefused, Mounts
from tests.rq_workers import ROOT
from worker import doctor

MODEL = ROOT / "ops" / "demo" / "model"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo's model, in two shards."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    names = sorted(tensors)
    places = {name: f"model-{1 + (names.index(name) > 20)}.safetensors" for name in names}
    for file in set(places.values()):
        held = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return folder


def faults(config: EngineConfig) -> list[Observation]:
    return [each for each in check_up(config) if each.grade != "ok"]


def test_a_whole_model_that_fits_has_no_fault(model: Path) -> None:
    found = list(check_up(EngineConfig(str(model))))
    assert {each.grade for each in found} == {"ok"}
    assert {each.subject for each in found} == {"gpu", "kernels", "model", "tokenizer", "memory"}


def cut_short(folder: Path) -> None:
    path = folder / "model-2.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model-1.safetensors")
    del tensors[min(tensors)]
    save_file(tensors, folder / "model-1.safetensors", metadata={"format": "pt"})


def of_architecture(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [name]}))

    return change


@pytest.mark.parametrize(
    ("spoil", "subject", "found", "mend"),
    [
        (
            lambda folder: (folder / "model-2.safetensors").unlink(),
            "model",
            "model-2.safe",
            "fetch them again",
        ),
        (cut_short, "model", "bytes, and its header names", "fetch it again"),
        (without_a_tensor, "model", "lacks model.", "fetch it again"),
        (of_architecture("JambaForCausalLM"), "model", "layers with a state outside", "MixtralForCausalLM"),
        (of_architecture("NobodysForCausalLM"), "model", "no model of transformers", "tokenmill models"),
        (lambda folder: (folder / "config.json").write_text("{"), "model", "cannot be read as JSON", ""),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer", "cannot be loaded", ""),
    ],
    ids=["shard", "truncated", "tensor", "refused", "unknown", "config", "tokenizer"],
)
def test_a_broken_model_is_found(
    model: Path, spoil: Callable[[Path], None], subject: str, found: str, mend: str
) -> None:
    spoil(model)
    told = faults(EngineConfig(str(model)))
    assert (told[0].grade, told[0].subject) == ("fault", subject)
    assert found in told[0].found
    assert mend in told[0].mend or mend in told[0].found


@pytest.mark.parametrize(
    ("options", "found", "mend"),
    [
        ({"kv_cache_bytes": 1 << 50}, "is more than the", "lower it"),
        (
            {"kv_cache_bytes": 1 << 16, "max_model_len": 500},
            "too few for one sequence of 500",
            "raise kv_cache",
        ),
        ({"max_model_len": 10**6}, "more than the model's 512 positions", "lower it"),
        ({"device": "cuda"}, "torch finds no CUDA device", "use 'cpu'"),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_found(
    model: Path, options: dict[str, object], found: str, mend: str
) -> None:
    if options.get("device") == "cuda" and check_machine.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    told = faults(EngineConfig(str(model), **options))
    assert found in told[0].found
    assert mend in told[0].mend


def test_a_model_that_is_nowhere_is_told_without_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no folder '/nowhere'" in faults(EngineConfig("/nowhere"))[0].found
    (told,) = faults(EngineConfig("nobody/no-such-model"))
    assert (told.grade, "hf download nobody/no-such-model" in told.mend) == ("warning", True)


def test_a_gpu_that_torch_cannot_use_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker does not start with it; one that is told to take the CPU does."""
    monkeypatch.setattr(device, "sign_of_gpu", lambda: "NVIDIA 550.54")
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    (told,) = check_machine.check_machine(EngineConfig("m"))
    assert (told.grade, "NVIDIA 550.54" in told.found) == ("fault", True)
    assert "set device=cpu" in told.mend
    assert {each.grade for each in check_machine.check_machine(EngineConfig("m", device="cpu"))} == {"ok"}


def test_kernels_that_cannot_be_kept_are_told(tmp_path: Path) -> None:
    (told,) = check_machine._check_folder(tmp_path / "kernels", private=True)
    assert told.grade == "ok"
    tmp_path.chmod(0o777)
    (told,) = check_machine._check_folder(tmp_path / "kernels", private=True)
    assert "may be written by others" in told.found
    assert not (tmp_path / "kernels").exists()


@pytest.fixture
def mounts() -> Iterator[Mounts]:
    found = Mounts()
    yield found
    found.close()


def test_a_root_that_takes_no_part_is_found(tmp_path: Path, mounts: Mounts) -> None:
    (told,) = bad(check_places([str(tmp_path / "gone")]))
    assert f"mkdir -p {tmp_path}/gone" in told.mend
    assert "cannot be written to" in bad(check_places(["/proc/self"]))[-1].found  # not even as root
    try:
        disk = mounts.tmpfs(tmp_path / "disk", 64)
        (disk / "filler").write_bytes(b"x" * (60 << 10))
        assert any("no part of a run fits" in each.found for each in bad(check_places([str(disk)])))
        mounts.change(disk, "ro")
    except MountRefused as error:
        pytest.skip(f"no mounts here: {error}")
    assert any("Read-only file system" in each.found for each in bad(check_places([str(disk)])))


def test_a_good_root_is_left_as_it_was_and_one_beside_it_may_be_closed(tmp_path: Path) -> None:
    found = list(check_places([str(tmp_path), str(tmp_path / "gone")]))
    assert sorted(each.level for each in found) == ["ok", "warning"]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs_result((4096, 4096, 10**6, 100, 100, 10**6, 50, 50, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    (told,) = bad(check_places([str(tmp_path)]))
    assert "no part of a run fits" in told.found


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"TOKENMILL_MAX_NUM_SEQ": "4"}, "did you mean TOKENMILL_MAX_NUM_SEQS?"),
        ({"TOKENMILL_KV_CACHE_BYTES": "4 gigs"}, "TOKENMILL_KV_CACHE_BYTES='4 gigs'"),
        ({"TOKENMILL_MAX_NUM_BATCHED_TOKENS": "8"}, "TOKENMILL_MAX_NUM_BATCHED_TOKENS=8 must exceed"),
        ({"TOKENMILL_DATA_ROOTS": "/nowhere"}, "'/nowhere' is not a folder"),
        ({"TOKENMILL_ALLOWED_FUNCTIONS": "nowhere.at_all"}, "nowhere.at_all"),
    ],
    ids=str,
)
def test_wrong_settings_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"TOKENMILL_MODEL": str(MODEL), **variables}.items():
        monkeypatch.setenv(name, value)
    (told,) = bad(doctor._check_settings())
    assert found in told.found + told.mend


def test_variables_of_rq_that_stand_in_the_way_are_found() -> None:
    environ = {"RQ_JOB_CLASS": "my.Job", "RQ_WORKER_CLASS": "rq.Worker"}
    one, other = bad(check_installation(environ=environ), Level.WARNING)
    assert (one.mend, "rq.Worker" in other.found) == ("unset RQ_JOB_CLASS", True)


def test_another_package_named_jobs_is_found(tmp_path: Path) -> None:
    assert bad(check_installation()) == []
    (tmp_path / "jobs.py").write_text("")
    (told,) = bad(check_installation([str(tmp_path), str(ROOT)]))
    assert str(tmp_path / "jobs.py") in told.found
    assert bad(check_installation([str(ROOT), str(tmp_path)])) == []


def test_a_check_that_hangs_or_fails_hides_no_other() -> None:
    def hangs() -> Iterator[Finding]:
        yield ok("a", "one")
        threading.Event().wait(30)
        yield ok("a", "two")

    def fails() -> Iterator[Finding]:
        raise OSError("no such device")

    found = list(
        examine([Examination("a", hangs, 0.05), Examination("b", fails, 5), Examination("c", list, 5)])
    )
    assert [each.level for each in found] == [Level.OK, Level.FAULT, Level.FAULT]
    assert "no answer within 0.05 s" in found[1].found
    assert "OSError: no such device" in found[2].found
