"""Small random checkpoints of encoders and of heads that classify, with a tokenizer of words."""

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from tests.engine.embedding_models import write_modules

VOCAB_SIZE, MAX_LENGTH = 300, 128
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "hidden_dim": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 160,
    "local_attention": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
}


def words(length: int, seed: int = 0) -> str:
    """Return a text of so many words."""
    drawn = random.Random(f"{seed}:{length}")
    return " ".join(f"w{drawn.randrange(VOCAB_SIZE - len(SPECIAL))}" for _ in range(length))


def write_encoder(folder: Path, model_type: str, num_labels: int = 0, **values: Any) -> Path:
    """Write a model, with a head of so many labels, or else with the mean of its states as embedding."""
    kind = CONFIG_MAPPING[model_type]
    known = kind()
    given = {
        name: value
        for name, value in {**SIZES, **values}.items()
        if hasattr(known, name) or name in values
    }
    config = kind(**given)
    torch.manual_seed(len(model_type))
    if num_labels:
        config.id2label = {number: f"class {number}" for number in range(num_labels)}
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        model = AutoModel.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.25)
            else:
                parameter.uniform_(0.4, 1.6) if "weight" in name else parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    _write_tokenizer(folder, has_types=getattr(config, "type_vocab_size", 0) > 1)
    if not num_labels:
        write_modules(folder, {"pooling_mode": "mean"}, size=config.hidden_size)
    return folder


def _write_tokenizer(folder: Path, *, has_types: bool) -> None:
    names = [*SPECIAL, *(f"w{number}" for number in range(VOCAB_SIZE - len(SPECIAL)))]
    tokenizer = Tokenizer(
        WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    inputs = ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_max_length=MAX_LENGTH,
        model_input_names=inputs,
    ).save_pretrained(folder)


class Alone:
    """What transformers' own model of a folder makes of a text, or of two, by itself."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
        has_head = not (folder / "modules.json").exists()
        kind: Any = AutoModelForSequenceClassification if has_head else AutoModel
        self._model = kind.from_pretrained(str(folder), dtype="float32").eval()

    def __call__(
        self, text: str, pair: str | None = None, *, most: int | None = None
    ) -> torch.Tensor:
        """Return a head's numbers, [labels], or the mean of the states, [hidden]. most: tokens to which it is cut."""
        return self._numbers(
            **self._tokenizer(text, pair, truncation=True, max_length=most, return_tensors="pt")
        )

    def of_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the same for token ids, [1, tokens]."""
        return self._numbers(input_ids=token_ids, attention_mask=torch.ones_like(token_ids))

    @torch.inference_mode()
    def _numbers(self, **inputs: torch.Tensor) -> torch.Tensor:
        output = self._model(**inputs)
        return output.logits[0] if "logits" in output else output.last_hidden_state[0].mean(0)
