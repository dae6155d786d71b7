"""`tokenmill doctor` finds what is wrong with a worker's model, machine, files and settings."""

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
from engine.run import check_machine
from jobs.doctor.findings import Examination, Finding, Level, examine, ok
from tests.doctor.test_redis_faults import bad
from tests.rq_workers import ROOT
from worker import doctor
from worker.doctor import check_roots

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


def cut_short(folder: Path) -> None:
    path = folder / "model-2.safetensors"
    os.truncate(path, path.stat().st_size - 1)


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
        (
            of_architecture("RwkvForCausalLM"),
            "model",
            "a state that transformers keeps",
            "Mamba2ForCausalLM",
        ),
        (
            lambda folder: (folder / "config.json").write_text("{"),
            "model",
            "cannot be read as JSON",
            "",
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{"),
            "tokenizer",
            "cannot be loaded",
            "",
        ),
    ],
    ids=["shard", "truncated", "refused", "config", "tokenizer"],
)
def test_a_broken_model_is_found(
    model: Path, spoil: Callable[[Path], None], subject: str, found: str, mend: str
) -> None:
    spoil(model)
    told = faults(EngineConfig(str(model)))
    assert (told[0].grade, told[0].subject) == ("fault", subject)
    assert found in told[0].text
    assert mend in told[0].mend or mend in told[0].text


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
    assert found in told[0].text
    assert mend in told[0].mend


def test_a_root_that_takes_no_part_is_found_and_a_good_one_left_as_it_was(tmp_path: Path) -> None:
    (told,) = bad(check_roots([str(tmp_path / "gone")]))
    assert f"mkdir -p {tmp_path}/gone" in told.mend
    assert "cannot be written to" in bad(check_roots(["/proc/self"]))[-1].text  # not even as root
    assert {each.level for each in check_roots([str(tmp_path)])} == {Level.OK}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"TOKENMILL_MAX_NUM_SEQ": "4"}, "did you mean TOKENMILL_MAX_NUM_SEQS?"),
        (
            {"TOKENMILL_MAX_NUM_BATCHED_TOKENS": "8", "TOKENMILL_MAX_NUM_SEQS": "8"},
            "TOKENMILL_MAX_NUM_BATCHED_TOKENS=8 must exceed",
        ),
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
    assert found in told.text + told.mend


def test_a_check_that_hangs_or_fails_hides_no_other() -> None:
    def hangs() -> Iterator[Finding]:
        yield ok("a", "one")
        threading.Event().wait(30)
        yield ok("a", "two")

    def fails() -> Iterator[Finding]:
        raise OSError("no such device")

    found = list(
        examine(
            [Examination("a", hangs, 0.05), Examination("b", fails, 5), Examination("c", list, 5)]
        )
    )
    assert [each.level for each in found] == [Level.OK, Level.FAULT, Level.FAULT]
    assert "no answer within 0.05 s" in found[1].text
    assert "OSError: no such device" in found[2].text
