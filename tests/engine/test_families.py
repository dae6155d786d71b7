"""Each family's greedy tokens equal transformers', computed from no cache; and the check can fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import engine.models.load
from engine import Engine, WeightMismatch
from engine.checkpoint.model_config import ModelConfig, read_model_config
from engine.layers.moe import ClampedSwiglu
from engine.layers.parallel import TensorParallel
from engine.models.decoder_config import DecoderConfig, LayerConfig, read_decoder_config
from engine.models.registry import ARCHITECTURES, DecoderFlags
from engine.run.forward.model_runner import ModelRunner
from tests.engine.families import BY_NAME
from tests.engine.family_runs import NUM_NEW_TOKENS, config_of, reference_of, run
from tests.engine.reference import Reference
from tests.engine.test_parity import prefill_logits

References = Callable[[str], Reference]
Change = Callable[[DecoderConfig], DecoderConfig]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The reference of a family, made when it is first asked for."""
    made: dict[str, Reference] = {}

    def find(name: str) -> Reference:
        if name not in made:
            made[name] = reference_of(tmp_path_factory.mktemp(name), BY_NAME[name])
        return made[name]

    return find


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", BY_NAME)
def test_greedy_tokens_equal_transformers(name: str, backend: str, family: References) -> None:
    """With chunks of 24 tokens, the prefix cache, and preemptions, all at once."""
    if backend == "cpu":
        pytest.importorskip("numba", reason="numba is not installed, so the CPU kernels cannot be compiled")
    differences, stats = run(family(name), backend=backend)
    assert differences == []
    assert stats.cached_tokens > 0
    assert stats.num_preemptions > 0
    answers = family(name).answers
    assert sum(len(set(answer)) for answer in answers) > NUM_NEW_TOKENS / 3 * len(answers)


def change_layers(**changes: Any) -> Change:
    """A fault in what each layer is; a function is given what it was."""

    def changed(layer: LayerConfig) -> LayerConfig:
        values = {
            name: change(getattr(layer, name)) if callable(change) else change
            for name, change in changes.items()
        }
        return replace(layer, **values)

    return lambda config: replace(config, layers=tuple(changed(layer) for layer in config.layers))


def change_experts(**changes: Any) -> Change:
    """A fault in the experts of each layer that has any."""
    return change_layers(experts=lambda experts: experts and replace(experts, **changes))


def change_flags(**changes: Any) -> Change:
    return lambda config: replace(config, flags=replace(config.flags, **changes))


def change_ropes(**changes: Any) -> Change:
    return lambda config: replace(config, ropes=tuple(replace(rope, **changes) for rope in config.ropes))


def wider(window: int | None) -> int | None:
    return window and window + 1


def narrower(window: int | None) -> int | None:
    return window and window - 1


def change_rope_parameters(**changes: float) -> Change:
    return lambda config: change_ropes(parameters={**config.ropes[0].parameters, **changes})(config)


FAULTS: list[tuple[str, str, Change]] = [
    ("llama3", "scaling left out", change_ropes(kind="default")),
    ("llama3", "another factor", change_rope_parameters(factor=2.0)),
    ("mistral", "window one too wide", change_layers(window=wider)),
    ("mistral", "window one too narrow", change_layers(window=narrower)),
    ("qwen2", "magnitude of yarn left out", change_rope_parameters(attention_factor=1.0)),
    ("qwen2_windows", "a window in every layer", change_layers(window=33)),
    ("qwen2_windows", "scaling left out", change_ropes(kind="default")),
    ("phi3", "window one too wide", change_layers(window=wider)),
    (
        "phi3_longrope",
        "factors of long sequences",
        change_rope_parameters(original_max_position_embeddings=99),
    ),
    ("phi3_longrope_beyond", "magnitude left out", change_rope_parameters(attention_factor=1.0)),
    ("gemma2", "window one too wide", change_layers(window=wider)),
    ("gemma2", "soft cap left out", lambda config: replace(config, attention_soft_cap=None)),
    ("gemma2", "scale of the head size", lambda config: replace(config, attention_scale=0.25)),
    ("gemma2", "embedding scale left out", change_flags(scaled_embeddings=False)),
    ("gemma2", "norm offset left out", change_flags(norm_offset=0.0)),
    ("gemma3", "one rotation for all layers", change_layers(rope=0)),
    ("gemma3", "norm offset left out", change_flags(norm_offset=0.0)),
    ("mixtral", "router without renormalisation", change_experts(normalised=False)),
    ("qwen3_moe", "router without renormalisation", change_experts(normalised=False)),
    ("qwen3_moe_mixed", "router with renormalisation", change_experts(normalised=True)),
    ("qwen3_moe_mixed", "one expert fewer", change_experts(num_chosen=2)),
    ("gpt_oss", "clamp left out", change_experts(swiglu=ClampedSwiglu(1.702, 1e9))),
    ("gpt_oss", "alpha left out", change_experts(swiglu=ClampedSwiglu(1.0, 1.5))),
    ("gpt_oss", "silu", change_experts(swiglu=None)),
]


@pytest.mark.parametrize(("name", "fault", "change"), FAULTS, ids=[f"{n}: {fault}" for n, fault, _ in FAULTS])
def test_a_fault_in_the_configuration_is_seen(
    name: str,
    fault: str,
    change: Change,
    family: References,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(model: ModelConfig, flags: DecoderFlags) -> DecoderConfig:
        return change(read_decoder_config(model, flags))

    monkeypatch.setattr(engine.models.load, "read_decoder_config", read)
    differences, _ = run(family(name))
    assert differences


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("qwen3", ["q_norm", "k_norm"]),
        ("olmo2", ["q_norm", "k_norm"]),
        ("olmo2", ["post_attention_layernorm"]),
        ("olmo2", ["post_feedforward_layernorm"]),
        ("gemma3", ["q_norm", "k_norm"]),
        ("gemma3", ["post_feedforward_layernorm"]),
    ],
)
def test_a_norm_left_out_is_seen(name: str, norms: list[str], family: References) -> None:
    def skip(built: Engine) -> None:
        for path, module in built._open_runner().model.named_modules():
            if path.rpartition(".")[2] in norms:
                module.forward = lambda x: x

    differences, _ = run(family(name), change=skip)
    assert differences


def test_logits_are_capped_as_transformers_caps_them(family: References) -> None:
    """Tokens alone would not tell: the cap keeps the order."""
    reference = family("gemma2")
    with Engine(config_of(reference.folder, "whole")) as built:
        for prompt in reference.prompts[:3]:
            logits, expected = prefill_logits(built, prompt), reference.logits(prompt)
            assert 2.0 < expected.abs().max() < 3.0
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(("max_model_len", "windows"), [(170, [20] * 3), (21, [20] * 3), (20, [None] * 3)])
def test_a_window_that_holds_every_sequence_is_none(
    max_model_len: int, windows: list[int | None], family: References
) -> None:
    """No kernel cuts what is never longer."""
    with Engine(config_of(family("mistral").folder, max_model_len=max_model_len)) as built:
        assert [layer.window for layer in built._open_runner().model.attention_layers] == windows


def test_factors_of_long_sequences_are_told_of(family: References, caplog: pytest.LogCaptureFixture) -> None:
    """They follow from max_model_len alone, and shorter sequences have them too."""
    for name, warns in (("phi3_longrope_beyond", True), ("phi3_longrope", False)):
        caplog.clear()
        with caplog.at_level("WARNING", logger="engine"), Engine(config_of(family(name).folder)):
            assert ("set max_model_len=9" in caplog.text) == warns


def test_stacked_tensors_that_do_not_fit_are_named(family: References, tmp_path: Path) -> None:
    folder = shutil.copytree(family("phi3").folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1}))
    with pytest.raises(WeightMismatch, match=r"qkv_proj.weight' .* 96 entries in dimension 0 expected"):
        Engine(config_of(folder))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_reads_its_rows_of_stacked_tensors(rank: int, family: References) -> None:
    folder, layer = family("phi3").folder, "model.layers.1."
    weights = load_file(folder / "model.safetensors")
    ranks = TensorParallel(rank, size=2)
    model = ModelRunner(config_of(folder), read_model_config(folder), folder, ranks).model
    for name, sizes in (("self_attn.qkv_proj", (64, 32, 32)), ("mlp.gate_up_proj", (96, 96))):
        stacked = weights[f"{layer}{name}.weight"].split(sizes)
        read = model.get_parameter(f"{layer}{name}.weight")
        expected = torch.cat([part.chunk(2)[rank] for part in stacked])
        torch.testing.assert_close(read.to_dense() if read.is_mkldnn else read, expected)


def test_frequencies_in_an_older_checkpoint_are_passed_over(family: References, tmp_path: Path) -> None:
    """Models compute them themselves; the first Llama checkpoints hold them."""
    folder = shutil.copytree(family("llama2").folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    Engine(config_of(folder)).close()


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", ["olmo2", "gpt_oss"])
def test_two_ranks_give_the_same_tokens(name: str, family: References) -> None:
    """Norms over the heads of all ranks; experts."""
    differences, _ = run(family(name), "tp2", "auto")
    assert differences == []


def test_sinks_left_out_are_seen(family: References) -> None:
    def forget(built: Engine) -> None:
        for layer in built._open_runner().model.model.layers:
            layer.self_attn.sinks = None

    differences, _ = run(family("gpt_oss"), change=forget)
    assert differences


@pytest.mark.parametrize("bias", ["gate.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias"])
def test_a_bias_of_router_or_experts_left_out_is_seen(bias: str, family: References) -> None:
    def forget(built: Engine) -> None:
        for layer in built._open_runner().model.model.layers:
            layer.mlp.get_parameter(bias).zero_()

    differences, _ = run(family("gpt_oss"), change=forget)
    assert differences


def test_every_native_architecture_is_compared() -> None:
    classes = AutoModelForCausalLM._model_mapping
    compared = {
        classes[type(AutoConfig.for_model(family.model_type))].__name__ for family in BY_NAME.values()
    }
    assert set(ARCHITECTURES) == compared


@pytest.mark.parametrize("name", ["phi3_longrope", "olmo2", "gemma2", "gemma3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_own(name: str, family: References) -> None:
    """Where norms, embeddings and rotations are rounded is a part of the model."""
    reference = family(name)
    theirs = AutoModelForCausalLM.from_pretrained(reference.folder, dtype=torch.bfloat16).eval()
    errors = [0.0, 0.0]
    with Engine(replace(config_of(reference.folder, "whole"), dtype="bfloat16")) as built:
        for prompt in reference.prompts[:4]:
            exact = reference.logits(prompt)
            with torch.inference_mode():
                other = theirs(torch.tensor([prompt]), use_cache=False).logits[0, -1]
            for i, logits in enumerate((prefill_logits(built, prompt), other.float())):
                errors[i] += ((logits - exact).square().mean().sqrt() / exact.std()).item()
    assert errors[0] < 1.2 * errors[1]
