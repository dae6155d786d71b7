"""On a GPU, and with GPU_TESTS_ON_CPU=1 in Triton's interpreter: whole engines in 16 bits, beside transformers.

An engine's log probabilities may be 1.5 times as far from float64 as transformers' own in the same dtype, on the same
device and with the same weights. The distance is the median of all tokens' errors. Where two experts score alike,
rounding chooses between them, and the few tokens behind such a choice are far off in either computation: they would
decide a mean.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine import Completion, Engine, EngineConfig, SamplingParams
from tests.engine.checkpoints import write_random
from tests.engine.families import COMMON, DELTA, EXPERTS, GEMMA, rope
from tests.engine.gpu import ON_CPU, needs_gpu, sized
from tests.engine.paged import DEVICE
from tests.engine.picture_models import PictureReference, append_token, make_with_pictures, prompts

pytestmark = needs_gpu

#: The dtype that users run. Triton's interpreter cuts off the digits that bfloat16 lacks, and rounds to float16.
DTYPE = sized(torch.bfloat16, torch.float16)
WORSE_THAN_TRANSFORMERS = 1.5
NUM_ANSWERED = sized(24, 10)
ANSWERED = SamplingParams(
    max_tokens=NUM_ANSWERED, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0
)
#: Embeddings of a published vocabulary would be most of the weights.
VOCABULARY = sized(16_384, 512)


def sizes(
    hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, num_layers: int
) -> dict[str, Any]:
    """Of a published model, by the names of config.json, with a few of its layers."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": num_layers,
        "initializer_range": 0.04,
    }


#: By name: transformers' model type, values that the interpreter uses too, and those of the published model.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen3-0.6B": (
        "qwen3",
        {"rope_parameters": rope(), "tie_word_embeddings": True},
        sizes(1024, 3072, 16, 8, 128, 4),
    ),
    "Gemma-2-9B": (
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        {**sizes(3584, 14_336, 16, 8, 256, 4), "query_pre_attn_scalar": 256, "sliding_window": 64},
    ),
    "Qwen3.5-9B": (
        "qwen3_5_text",
        {**DELTA, "full_attention_interval": 2, "num_hidden_layers": 4},
        {
            **sizes(4096, 12_288, 16, 4, 256, 4),
            "rope_parameters": rope(partial_rotary_factor=0.25),
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {**EXPERTS, "norm_topk_prob": True},
        {
            **sizes(2048, 6144, 32, 4, 128, 2),
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
}


def token_prompts() -> list[list[int]]:
    """Some behind a common prefix, some longer than the windows."""
    rng = random.Random(0)
    prefix = [rng.randrange(3, 500) for _ in range(32)]
    lengths = (30, 5, 41, 12, 3) if ON_CPU else range(10, 310, 10)
    return [
        prefix * (i % 2) + [rng.randrange(3, VOCABULARY) for _ in range(length)]
        for i, length in enumerate(lengths)
    ]


def make_model(folder: Path, name: str) -> Path:
    """Write a random checkpoint in DTYPE with its tokenizer; return its folder."""
    model_type, values, published = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        **{**COMMON, "vocab_size": VOCABULARY, **values, **({} if ON_CPU else published)},
    )
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    return write_random(model, folder)


def engine_config(folder: Path, **changes: Any) -> EngineConfig:
    """Prompts come in chunks, beside decodes."""
    values: dict[str, Any] = {
        "dtype": str(DTYPE).removeprefix("torch."),
        "device": DEVICE.type,
        "attention_backend": "triton",
        "max_model_len": sized(512, 128),
        "max_num_seqs": 32,
        "max_num_batched_tokens": sized(700, 50),
        "kv_cache_bytes": 1 << sized(28, 22),
    }
    return EngineConfig(str(folder), **(values | changes))


def logprobs_of(completion: Completion) -> tuple[list[float], list[float]]:
    """The log probability of each token of a prompt but the first, and of its answer."""
    assert completion.error is None
    assert completion.prompt_logprobs is not None
    assert completion.logprobs is not None
    prompt = [next(iter(each.values())).logprob for each in completion.prompt_logprobs if each]
    answer = [next(iter(each.values())).logprob for each in completion.logprobs]
    return prompt, answer


@torch.inference_mode()
def logprobs_by(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """transformers' log probability of each token but the first, by a pass over all."""
    token_ids = inputs["input_ids"][0, 1:].to(DEVICE)
    on_device = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
    logits = model(**on_device, use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, token_ids[:, None])[:, 0].cpu()


def logprobs_in(
    dtype: torch.dtype, kind: Any, folder: Path, inputs: list[dict[str, Any]]
) -> list[torch.Tensor]:
    """The same of each of the inputs, by the checkpoint's model in a dtype."""
    # transformers' kernels for experts do not know float64
    model = kind.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    model.eval().to(DEVICE)
    return [logprobs_by(model, each) for each in inputs]


def assert_as_close(
    completions: list[Completion], inputs: list[dict[str, Any]], kind: Any, folder: Path
) -> None:
    """The engine is about as close to float64 as transformers is, in prompts and in answers.

    inputs: transformers', of each prompt with its answer.  kind: transformers' class.
    """
    exact = logprobs_in(torch.float64, kind, folder, inputs)
    rounded = logprobs_in(DTYPE, kind, folder, inputs)
    errors: dict[str, list[torch.Tensor]] = {"prompts": [], "answers": []}
    for completion, right, theirs in zip(completions, exact, rounded, strict=True):
        prompt, answer = logprobs_of(completion)
        ours = torch.tensor(prompt + answer, dtype=torch.float64)
        assert len(ours) == len(right)
        both = torch.stack((ours - right, theirs - right)).abs()
        errors["prompts"].append(both[:, : len(prompt)])
        errors["answers"].append(both[:, len(prompt) :])
    for name, found in errors.items():
        own, of_transformers = torch.cat(found, dim=1).median(dim=1).values.tolist()
        assert own <= WORSE_THAN_TRANSFORMERS * of_transformers, (name, own, of_transformers)


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_as_close_to_float64_as_transformers(name: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, name)
    asked = token_prompts()
    with Engine(engine_config(folder)) as engine:
        completions = engine.generate(asked, ANSWERED)
    inputs = [
        {"input_ids": torch.tensor([prompt + completion.token_ids])}
        for prompt, completion in zip(asked, completions, strict=True)
    ]
    assert_as_close(completions, inputs, AutoModelForCausalLM, folder)


def test_pictures_are_as_close_to_float64_as_transformers(tmp_path: Path) -> None:
    """Small pictures, in a small model with all parts that Qwen3.5 has."""
    folder = make_with_pictures(tmp_path, "qwen3_5")
    weights = folder / "model.safetensors"
    tensors = {name: tensor.to(DTYPE) for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    reference = PictureReference(folder, "qwen3_5")
    asked = prompts()[: sized(10, 4)]
    # in an answer, such a token would stand for a picture that is not there
    params = replace(ANSWERED, logit_bias={reference.model.config.image_token_id: -100.0})
    with Engine(engine_config(folder, max_num_batched_tokens=200, max_model_len=256)) as engine:
        completions = engine.generate(asked, params)
    inputs = [reference.inputs(parts) for parts in asked]
    for each, completion in zip(inputs, completions, strict=True):
        for token_id in completion.token_ids:
            append_token(each, token_id)
    assert_as_close(completions, inputs, type(reference.model), folder)
