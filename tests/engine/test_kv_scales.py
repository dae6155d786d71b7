"""Scales of an FP8 KV cache that a checkpoint brings: under which names, for which heads, and which are refused."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import (
    DamagedWeights,
    Engine,
    EngineConfig,
    SamplingParams,
    UnsupportedModel,
    WeightMismatch,
)
from engine.checkpoint.kv_scales import find_kv_scales
from engine.checkpoint.model_config import read_model_config
from engine.run.config import model_identity
from tests.engine.checkpoints import SHAPES, pool_bytes
from tests.engine.forked_ranks import LOG, ForkedRank, LoggingRank
from tests.engine.quantizers import FORMATS, quantize_checkpoint
from tests.engine.reference import Reference
from tests.engine.test_kv_cache_fp8 import logits_of

SHAPE = next(shape for shape in SHAPES if shape.name == "gqa2_bias")  # 2 layers, 2 KV heads
#: As compressed-tensors writes it.
SCHEME = {
    "num_bits": 8,
    "type": "float",
    "dynamic": False,
    "strategy": "tensor",
    "symmetric": True,
    "observer": "minmax",
}
NAN, INF = float("nan"), float("inf")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 9, 300, 7], [411], list(range(40, 90))]

Scaled = Callable[..., Path]


@pytest.fixture
def plain(folders: dict[str, Path]) -> Path:
    return folders[SHAPE.name]


@pytest.fixture
def scaled(plain: Path, tmp_path: Path) -> Scaled:
    """Copies a checkpoint and adds tensors, and a section of config.json about quantization."""

    def make(
        tensors: dict[str, Tensor], section: dict[str, Any] | None = None, source: Path = plain
    ) -> Path:
        folder = Path(shutil.copytree(source, tmp_path / "scaled", dirs_exist_ok=True))
        stored = load_file(source / "model.safetensors")
        save_file(stored | tensors, folder / "model.safetensors")
        values = json.loads((source / "config.json").read_text())
        if section is not None:
            values["quantization_config"] = section
        (folder / "config.json").write_text(json.dumps(values))
        return folder

    return make


def cache_scheme(**changes: Any) -> dict[str, Any]:
    """The section of a checkpoint of which nothing but the KV cache is quantized."""
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": SCHEME | changes,
    }


def of_layers(form: str, keys: float = 0.03, values: float = 0.7) -> dict[str, Tensor]:
    """Scales of two layers; those of the second are twice as large."""
    tensors = {}
    for layer in range(2):
        for side, scale in (("k", keys), ("v", values)):
            name = f"model.layers.{layer}.self_attn.{form.format(side=side)}"
            tensors[name] = torch.tensor(scale * (1 + layer))
    return tensors


def config(folder: Path, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 200, "max_num_seqs": 8, "max_num_batched_tokens": 600,
        "kv_cache_bytes": pool_bytes(SHAPE, 100), "attention_backend": "torch", "kv_cache_dtype": "fp8_e4m3",
    }  # fmt: skip
    return EngineConfig(str(folder), **{**values, **changes})


def scales_of(folder: Path, **changes: Any) -> list[list[list[float]]]:
    """Of each layer the keys' and the values' scales in the cache, one for each head."""
    with Engine(config(folder, **changes)) as engine:
        runner: Any = engine._open_runner()
        for layer in runner.cache.layers:
            assert all(scales.dtype == torch.float32 for scales in layer.scales)
        return [[scales.tolist() for scales in layer.scales] for layer in runner.cache.layers]


def single(number: float) -> float:
    """The number as float32 holds it."""
    return torch.tensor(number).item()


EXPECTED = [[[single(0.03)] * 2, [single(0.7)] * 2], [[single(0.06)] * 2, [single(1.4)] * 2]]


@pytest.mark.parametrize("model_path", ["native", "transformers"])
@pytest.mark.parametrize(
    "form",
    ["{side}_scale", "attn.{side}_scale", "{side}_proj.{side}_scale", "{side}_proj.output_scale"],
)
def test_every_usual_name_is_found_and_one_scale_serves_all_heads(
    scaled: Scaled, form: str, model_path: str
) -> None:
    """Also where config.json says nothing of them, as ModelOpt may leave it."""
    folder = scaled(of_layers(form))
    assert scales_of(folder, model_path=model_path) == EXPECTED
    with Engine(config(folder, model_path=model_path, kv_cache_dtype="auto")) as engine:
        assert engine.generate(PROMPTS, GREEDY)


def test_an_old_scale_serves_keys_and_values(scaled: Scaled) -> None:
    tensors = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor([0.3]) for i in range(2)}
    assert scales_of(scaled(tensors, cache_scheme())) == [[[single(0.3)] * 2] * 2] * 2


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1), (1, 2, 1, 1)])
def test_a_head_may_have_its_own_scale(scaled: Scaled, shape: tuple[int, ...]) -> None:
    tensors = of_layers("{side}_scale")
    name = "model.layers.1.self_attn.v_scale"
    tensors[name] = torch.tensor([0.125, 3.0]).to(torch.bfloat16).view(shape)
    found = scales_of(scaled(tensors, cache_scheme(strategy="attn_head")))
    assert found == [EXPECTED[0], [EXPECTED[1][0], [0.125, 3.0]]]


def test_what_has_no_scale_is_measured(plain: Path, scaled: Scaled) -> None:
    """A scale of a layer that guesses tokens ahead is no scale of the model's."""
    measured = scales_of(plain)
    tensors = of_layers("{side}_scale")
    del tensors["model.layers.0.self_attn.k_scale"]
    more = {
        "mtp.layers.0.self_attn.k_scale": torch.tensor(5.0),
        "model.layers.2.self_attn.k_scale": torch.tensor(5.0),
    }
    found = scales_of(scaled(tensors | more, cache_scheme()))
    assert found == [[measured[0][0], EXPECTED[0][1]], EXPECTED[1]]


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "fp8", "kv_cache_scheme": "static"},
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": None},
    ],
    ids=lambda section: section["quant_method"],
)
def test_every_tools_section_is_understood(scaled: Scaled, section: dict[str, Any]) -> None:
    assert scales_of(scaled(of_layers("{side}_scale"), section)) == EXPECTED


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_bits": 4}, "kv_cache_scheme with num_bits 4"),
        ({"type": "int"}, "kv_cache_scheme with type 'int'"),
        ({"dynamic": True}, "kv_cache_scheme with dynamic True"),
        ({"strategy": "channel"}, "kv_cache_scheme with strategy 'channel'"),
        ({"symmetric": False}, "kv_cache_scheme with symmetric False"),
    ],
    ids=str,
)
def test_scales_for_another_kind_of_cache_are_left_out_with_a_warning(
    plain: Path,
    scaled: Scaled,
    changes: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = scaled(of_layers("{side}_scale"), cache_scheme(**changes))
    with caplog.at_level(logging.WARNING, "engine"):
        assert scales_of(folder) == scales_of(plain)
    assert reason in caplog.text


@pytest.mark.parametrize("value", [0.0, -0.5, NAN, INF])
def test_an_impossible_scale_is_refused_by_name(scaled: Scaled, value: float) -> None:
    """Only where the cache needs it."""
    name = "model.layers.1.self_attn.v_scale"
    folder = scaled(of_layers("{side}_scale") | {name: torch.tensor(value)}, cache_scheme())
    with pytest.raises(DamagedWeights, match=rf"'{name}' in .* not finite and above 0"):
        Engine(config(folder))
    with Engine(config(folder, kv_cache_dtype="auto")) as engine:
        assert engine.generate(PROMPTS, GREEDY)


def test_scales_of_compressed_keys_and_values_are_left_out(scaled: Scaled) -> None:
    """As DeepSeek has them: here each head has keys of its own in the cache."""
    folder = scaled(of_layers("{side}_scale"))
    model = read_model_config(folder)
    names = [f"model.layers.0.self_attn.{side}_scale" for side in "kv"]
    assert len(find_kv_scales(names, model)) == 2
    compressed = replace(model, values={**model.values, "kv_lora_rank": 512})
    assert find_kv_scales(names, compressed) == {}


def test_scales_for_another_number_of_heads_are_refused(scaled: Scaled) -> None:
    name = "model.layers.0.self_attn.k_scale"
    folder = scaled({name: torch.ones(3)}, cache_scheme(strategy="attn_head"))
    with pytest.raises(
        WeightMismatch, match=rf"'{name}' in .* has 3 scales; expected 1 .* or 2, one for"
    ):
        Engine(config(folder))


def test_a_scale_is_what_a_stored_number_is_multiplied_by(
    plain: Path, scaled: Scaled, caplog: pytest.LogCaptureFixture
) -> None:
    """As tools write them: the largest number by 448. Much smaller ones cut keys and values, and the log says so."""
    prompt = max((p for p in Reference(plain).prompts if len(p) < 150), key=len)
    exact, _ = logits_of(plain, prompt, kv_cache_dtype="auto")
    measured = scales_of(plain)  # with room for 8 to 16 times as much

    def error(factor: float) -> float:
        tensors = {
            f"model.layers.{i}.self_attn.{side}_scale": torch.tensor(scales) * factor
            for i, layer in enumerate(measured)
            for side, scales in zip("kv", layer, strict=True)
        }
        found, _ = logits_of(scaled(tensors, cache_scheme(strategy="attn_head")), prompt)
        return float(((found - exact).square().mean(-1).sqrt() / exact.std(-1)).max())

    with caplog.at_level(logging.WARNING, "engine"):
        assert 1e-4 < error(0.3) < 0.15
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "engine"):
        assert error(0.003) > 0.15
    assert "times as large as the checkpoint's scales of the KV cache allow" in caplog.text


@pytest.mark.processes
def test_each_rank_takes_the_scales_of_its_own_heads(
    scaled: Scaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second head's are so small that all its keys and values are cut, in each other's place or not."""
    monkeypatch.setattr("engine.tensor_parallel.rank_group.RankProcess", ForkedRank)
    tensors = {
        name: torch.stack((scale, scale / 2000))
        for name, scale in of_layers("{side}_scale").items()
    }
    folder = scaled(tensors, cache_scheme(strategy="attn_head"))
    answers = []
    for ranks in (1, 2):
        with Engine(config(folder, tensor_parallel_size=ranks)) as engine:
            answers.append([each.token_ids for each in engine.generate(PROMPTS, GREEDY)])
    assert answers[0] == answers[1]


@pytest.mark.processes
def test_heads_of_another_rank_that_are_cut_are_logged(
    scaled: Scaled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone logs warnings. Its own head has room here, and the second rank's has none."""
    monkeypatch.setattr("engine.tensor_parallel.rank_group.RankProcess", LoggingRank)
    log = tmp_path / "rank0.log"
    monkeypatch.setenv(LOG, str(log))
    tensors = {
        name: torch.stack((scale, scale * 1e-9))
        for name, scale in of_layers("{side}_scale").items()
    }
    folder = scaled(tensors, cache_scheme(strategy="attn_head"))
    with Engine(config(folder, tensor_parallel_size=2)):
        pass
    assert "more than 2 times as large as the checkpoint's scales" in log.read_text()


def test_a_quantized_checkpoint_brings_scales_too(
    plain: Path, scaled: Scaled, tmp_path: Path
) -> None:
    for name in ("ct_fp8_tensor", "modelopt_fp8"):
        made = quantize_checkpoint(plain, tmp_path / name, FORMATS[name]).folder
        section = json.loads((made / "config.json").read_text())["quantization_config"]
        section["kv_cache_scheme"] = SCHEME
        folder = scaled(of_layers("{side}_proj.{side}_scale"), section, source=made)
        assert scales_of(folder) == EXPECTED


def test_other_weights_of_modelopt_are_refused(scaled: Scaled) -> None:
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    with pytest.raises(UnsupportedModel, match="quant_algo 'NVFP4' is not supported"):
        read_model_config(scaled({}, section))


def test_answers_over_stored_scales_are_another_models(scaled: Scaled) -> None:
    """Earlier commits measured all scales, and their answers must not be taken for these."""
    for section, is_taken in ((cache_scheme(), True), (cache_scheme(num_bits=4), False)):
        folder = scaled(of_layers("{side}_scale"), section)
        modes = model_identity(config(folder)).dtype.split(", ")
        assert ("scales of the checkpoint" in modes) == is_taken
        plain_modes = model_identity(config(folder, kv_cache_dtype="auto")).dtype.split(", ")
        assert "scales of the checkpoint" not in plain_modes
