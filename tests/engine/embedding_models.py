"""Random checkpoints for embeddings, as sentence-transformers has them, and what their states are."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaModel

from tests.engine.checkpoints import VOCAB_SIZE, Shape, make_checkpoint, make_tokenizer

TYPES = {
    "Transformer": "sentence_transformers.models.Transformer",
    "Pooling": "sentence_transformers.models.Pooling",
    "Normalize": "sentence_transformers.models.Normalize",
    "Dense": "sentence_transformers.models.Dense",
}
QUERY = "Instruct: find what answers it\nQuery: "


def write_modules(folder: Path, pooling: dict[str, Any], *more: str, size: int) -> None:
    """Write modules.json and what belongs to it. pooling: the Pooling's config. more: further modules."""
    kinds = ["Transformer", "Pooling", *more]
    paths = ["", *(f"{place}_{kind}" for place, kind in enumerate(kinds[1:], start=1))]
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": TYPES[kind]}
        for place, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    values = {"word_embedding_dimension": size, **pooling}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(values))


def _write_tokenizer(folder: Path, post_processor: TemplateProcessing) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = post_processor
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)


def like_qwen3_embedding(folder: Path, hidden_size: int = 40) -> Path:
    """The last token's state, which is of an end token that the tokenizer adds; names without "model."."""
    shape = Shape(
        "embedding", hidden_size=hidden_size, num_layers=3, tied=True, max_positions=128, seed=6
    )
    make_checkpoint(folder, shape)
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("model."): each for name, each in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    _write_tokenizer(
        folder, TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    )
    last_token = {
        "pooling_mode_mean_tokens": False,
        "pooling_mode_lasttoken": True,
        "include_prompt": True,
    }
    write_modules(folder, last_token, "Normalize", size=hidden_size)
    prompts = {"prompts": {"query": QUERY, "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def llama_body(
    folder: Path, mode: str | list[str] = "mean", max_seq_length: int = 32, hidden_size: int = 48
) -> Path:
    """A LlamaModel without any LM head; texts begin with a token, are cut, and not normalised."""
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        initializer_range=0.2,
        dtype="float32",
    )
    model = LlamaModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.4, 1.6)
    model.save_pretrained(folder)
    frame = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    _write_tokenizer(folder, frame)
    write_modules(folder, {"pooling_mode": mode}, size=hidden_size)
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": max_seq_length, "do_lower_case": False})
    )
    return folder


class Truth:
    """What transformers' own model of a folder makes of token ids, in float32."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _model(self) -> Any:
        return AutoModel.from_pretrained(str(self._folder), dtype="float32").eval()

    @cached_property
    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(str(self._folder))

    def token_ids(self, text: str, max_length: int) -> list[int]:
        """As sentence-transformers has a text tokenized."""
        found: list[int] = self._tokenizer(text, truncation=True, max_length=max_length)[
            "input_ids"
        ]
        return found

    @torch.inference_mode()
    def pooled(self, token_ids: list[int], mode: str) -> Tensor:
        """[hidden]: one vector, as sentence-transformers' Pooling defines its modes."""
        states: Tensor = self._model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
        weights = torch.arange(1.0, len(states) + 1)[:, None]
        pooled: dict[str, Tensor] = {
            "cls": states[0],
            "lasttoken": states[-1],
            "max": states.amax(0),
            "mean": states.mean(0),
            "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
            "weightedmean": (states * weights).sum(0) / weights.sum(),
        }
        return pooled[mode]
