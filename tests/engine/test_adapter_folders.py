"""Adapters are found, loaded or refused as their folder says. A request with a refused adapter fails alone."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Completion, ConfigError, Engine, UnknownAdapter, check_up
from engine.checkpoint.adapter_folder import NO_FILES, Adapter, AdapterFolder, scale_of
from engine.errors import AdapterRefused
from engine.run.forward import memory, model_runner
from engine.tensor_parallel.rank import _load_adapter
from tests.engine.adapters import GREEDY, PROMPTS, SHAPE, Stage, ask, make_adapter, make_stage
from tests.engine.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return make_stage(tmp_path_factory.mktemp("adapters"))


def test_a_new_sub_folder_is_found_and_changed_files_are_another_adapter(
    stage: Stage, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    with Engine(stage.config(adapters=str(folder))) as built:
        with pytest.raises(UnknownAdapter, match="there is no adapter 'all'; there are none yet"):
            built.add("1", [5, 6], replace(GREEDY, adapter="all"))
        shutil.copytree(stage.adapters / "all", folder / "all")
        first = ask(built, PROMPTS[8], "all")
        pinned = AdapterFolder(str(folder)).find("all").pinned
        assert ask(built, PROMPTS[8], pinned).token_ids == first.token_ids
        shutil.rmtree(folder / "all")
        shutil.copytree(stage.adapters / "mlp", folder / "all")
        other = ask(built, PROMPTS[8], "all")
        assert other.token_ids != first.token_ids
        assert other.num_cached_tokens == 0
        assert other.token_ids == stage.references["mlp"]._generate(PROMPTS[8])
        (refused,) = built.generate([[5, 6]], replace(GREEDY, adapter=pinned))
        assert refused.lacks_adapter
        assert str(refused.error).startswith("the files of adapter 'all' have changed")


@pytest.mark.parametrize("replaced_by", ["others", "nothing", "half"])
def test_a_request_whose_adapter_changes_before_it_is_loaded_says_so(
    stage: Stage, tmp_path: Path, replaced_by: str
) -> None:
    """It waits for a place meanwhile; the one that uses the place has its answer of the old files."""
    folder = tmp_path / "adapters"
    shutil.copytree(stage.adapters, folder)
    with Engine(stage.config(adapters=str(folder), max_adapters=1)) as built:
        built.add("first", PROMPTS[8], replace(GREEDY, adapter="mlp"))
        built.step()
        built.add("waits", PROMPTS[8], replace(GREEDY, adapter="all"))
        for name in ("all", "mlp"):
            shutil.rmtree(folder / name)
        if replaced_by != "nothing":
            shutil.copytree(stage.adapters / "attention", folder / "all")
        if replaced_by == "half":
            weights = folder / "all" / "adapter_model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-9])
        done: dict[str, Completion] = {}
        while built.has_unfinished:
            done |= {each.request_id: each for each in built.step()}
    assert done["first"].token_ids == stage.references["mlp"]._generate(PROMPTS[8])
    assert not done["first"].lacks_adapter
    assert done["waits"].lacks_adapter
    assert "the files of adapter 'all' have changed" in str(done["waits"].error)


def test_an_adapter_that_was_never_there_is_unknown_and_nobody_waits_for_it(stage: Stage) -> None:
    with Engine(stage.config()) as built:
        (refused,) = built.generate([[5, 6]], replace(GREEDY, adapter=f"all@{NO_FILES}"))
    assert str(refused.error).startswith("there was no adapter 'all' when it was looked for")
    assert not refused.lacks_adapter


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is set, which is not built"),
        ({"bias": "all"}, "bias is 'all', and only 'none' is built"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is set"),
        ({"target_parameters": ["experts.down"]}, "target_parameters is set"),
        ({"init_lora_weights": "pissa"}, "changes the model's own weights"),
        ({"something_of_next_year": 3}, "something_of_next_year is set"),
        ({"lora_alpha": "16"}, "lora_alpha must be a number"),
        ({"lora_alpha": math.nan}, "lora_alpha must be a number .* got nan"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number .* got 1000"),
        ({"alpha_pattern": {"q_proj": math.inf}}, "lora_alpha must be a number .* got inf"),
        ({"alpha_pattern": {"(q_proj": 4}}, r"alpha_pattern has .\(q_proj., which is no pattern"),
    ],
)
def test_what_is_not_built_is_named(
    stage: Stage, tmp_path: Path, values: dict[str, Any], problem: str
) -> None:
    make_adapter(tmp_path / "bad", stage.model, seed=1, **values)
    with pytest.raises(AdapterRefused, match=f"adapter 'bad' cannot be used: .*{problem}"):
        AdapterFolder(str(tmp_path)).find("bad")


def test_whole_numbers_in_place_of_weights_are_refused_by_name(
    stage: Stage, tmp_path: Path
) -> None:
    weights = make_adapter(tmp_path / "bad", stage.model, seed=1) / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor.int() for name, tensor in tensors.items()}, weights)
    with pytest.raises(AdapterRefused, match=r"'bad' .*lora_A.weight' in .* is of type I32"):
        AdapterFolder(str(tmp_path)).find("bad")


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_a_module_that_stands_in_an_adapter_twice_is_refused_by_name(
    stage: Stage, tmp_path: Path, prefix: str
) -> None:
    """Without PEFT's prefix, or without the one of the model's body."""
    weights = make_adapter(tmp_path / "bad", stage.model, seed=1) / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"
    other = name.removeprefix("base_model.model.model." if prefix else "base_model.model.")
    for half in "AB":
        tensors[prefix + other.format(half)] = tensors[name.format(half)].clone()
    save_file(tensors, weights)
    bad = AdapterFolder(str(tmp_path)).find("bad")
    with Engine(stage.config()) as built:
        runner: Any = built._open_runner()
        with pytest.raises(AdapterRefused, match=r"'bad' .* holds '.*up_proj' twice"):
            runner.load_adapter(0, bad)


def test_an_adapter_that_cannot_be_loaded_fails_its_own_requests_alone(
    stage: Stage, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    shutil.copytree(stage.adapters, folder)
    other = make_checkpoint(tmp_path / "other", replace(SHAPE, hidden_size=64))
    make_adapter(folder / "of_another", other, seed=1)
    make_adapter(folder / "deeper", stage.model, seed=1)
    deeper = folder / "deeper" / "adapter_model.safetensors"
    deeper.write_bytes(deeper.read_bytes().replace(b"layers.1.", b"layers.9."))
    make_adapter(folder / "cut", stage.model, seed=1)
    cut = folder / "cut" / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    make_adapter(folder / "diverged", stage.model, seed=1)
    diverged = folder / "diverged" / "adapter_model.safetensors"
    tensors = load_file(diverged)
    save_file({name: tensor / 0 for name, tensor in tensors.items()}, diverged)
    names = ["all", "of_another", None, "deeper", "cut", "nobody", "diverged"]
    with Engine(stage.config(adapters=str(folder))) as built:
        done = built.generate([PROMPTS[8]] * 7, [replace(GREEDY, adapter=name) for name in names])
        assert not built.has_unfinished
    observations = [
        observation for observation in check_up(built.config) if observation.subject == "adapters"
    ]
    assert [observation.grade for observation in observations] == ["warning", "ok"]
    assert "'cut' cannot be used" in observations[0].text
    assert done[0].token_ids == stage.references["all"]._generate(PROMPTS[8])
    assert done[2].token_ids == stage.references[None]._generate(PROMPTS[8])
    assert "adapter 'of_another' cannot be used" in str(done[1].error)
    assert "was it trained on another model?" in str(done[1].error)
    assert "this model has no such linear layer" in str(done[3].error)
    assert "no complete safetensors file" in str(done[4].error)
    assert "there is no adapter 'nobody'; known are all, attention" in str(done[5].error)
    assert "adapter 'diverged' cannot be used: 'model.layers.0." in str(done[6].error)
    assert "has numbers that are NaN or infinite in float32" in str(done[6].error)


def test_names_that_no_job_can_ask_for_are_not_listed(stage: Stage, tmp_path: Path) -> None:
    """Hidden folders, as copies that are not whole yet, and names that look pinned or have line breaks."""
    for name in ("all", ".copying", f"all@{'0' * 32}", "two\nlines"):
        shutil.copytree(stage.adapters / "all", tmp_path / name)
    folder = AdapterFolder(str(tmp_path))
    assert folder.names() == ["all"]
    assert [adapter.name for adapter in folder.look()[0]] == ["all"]
    with pytest.raises(UnknownAdapter, match=r"no adapter .two.nlines.; known are all"):
        folder.find("two\nlines")


def test_an_engine_that_cannot_have_adapters_says_so(stage: Stage) -> None:
    with pytest.raises(ConfigError, match=r"adapters=.* cannot be used: this model runs through"):
        Engine(stage.config(model_path="transformers"))
    with pytest.raises(ConfigError, match=r"adapters=.* cannot be used with deterministic=True"):
        stage.config(deterministic=True)
    with pytest.raises(ConfigError, match="adapters='/nowhere' is no folder"):
        Engine(stage.config(adapters="/nowhere"))
    with pytest.raises(ConfigError, match="max_adapters must be a positive integer"):
        stage.config(max_adapters=0)


def test_an_engine_without_adapters_refuses_requests_that_name_one(stage: Stage) -> None:
    with Engine(stage.config(adapters=None)) as built:
        (refused,) = built.generate([[5, 6]], replace(GREEDY, adapter="all"))
        assert refused.error == ("there is no adapter 'all'; this model is served without adapters")
        built.generate([[5, 6]], GREEDY)
        assert built.stats().adapter_steps == 0


def test_the_pool_leaves_memory_for_the_adapters_that_may_be_loaded(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as the largest one in the folder takes, for each place; `doctor` counts the same."""
    largest = 0
    for file in stage.adapters.glob("*/adapter_model.safetensors"):
        largest = max(largest, sum(tensor.nelement() for tensor in load_file(file).values()))
    config = stage.config(max_adapters=3)
    assert memory.adapter_bytes(config, number_bytes=4) == 3 * largest * 4
    assert memory.adapter_bytes(stage.config(adapters=None), number_bytes=4) == 0
    refused = stage.adapters / "refused"
    shutil.copytree(stage.adapters / "all", refused)
    values = json.loads((refused / "adapter_config.json").read_text())
    (refused / "adapter_config.json").write_text(
        json.dumps({**values, "modules_to_save": ["lm_head"]})
    )
    save_file(
        {"lm_head.weight": torch.zeros(4, 10 * largest)}, refused / "adapter_model.safetensors"
    )
    assert memory.adapter_bytes(config, number_bytes=4) == 3 * largest * 4
    shutil.rmtree(refused)

    assert config.kv_cache_bytes is not None
    room = config.kv_cache_bytes + 3 * largest * 4
    for missing in (0, 1):
        monkeypatch.setattr(model_runner, "allowed_bytes", lambda missing=missing: room - missing)
        if missing:
            with pytest.raises(ConfigError, match=r"left of .* beside 0.00 GiB for max_adapters=3"):
                Engine(config)
        else:
            Engine(config).close()
    (of_memory,) = [
        observation for observation in check_up(config) if observation.subject == "memory"
    ]
    assert ", and 3 adapters 0.00 GiB and a KV pool of" in of_memory.text


def test_names_that_leave_the_folder_are_unknown(stage: Stage) -> None:
    folder = AdapterFolder(str(stage.adapters))
    for name in ("../folder/all", "all/", "/", "..", ".", ""):
        with pytest.raises(UnknownAdapter):
            folder.find(name)


def test_scales_follow_patterns_and_rslora() -> None:
    values = {"lora_alpha": 16, "alpha_pattern": {"layers.1.self_attn.q_proj": 4, r"down_\w+": 8}}
    assert scale_of(values, "model.layers.0.self_attn.q_proj", 8) == 2
    assert scale_of(values, "model.layers.1.self_attn.q_proj", 8) == 0.5
    assert scale_of(values, "model.layers.3.mlp.down_proj", 4) == 2
    assert scale_of({**values, "use_rslora": True}, "x", 16) == 4


def test_a_rank_says_what_any_error_of_an_adapters_files_was_and_goes_on() -> None:
    class Broken:
        def load_adapter(self, number: int, adapter: Adapter) -> None:
            raise ValueError("no such number")

    runner: Any = Broken()
    assert _load_adapter(runner, 0, "a", "f", "/nowhere") == "ValueError: no such number"
