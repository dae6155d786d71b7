"""A small random checkpoint of a model that reads pictures, with its processor, and transformers' greedy answers."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from engine import Completion
from engine.pictures.reader import open_processor
from ops.models.checkpoints import WITH_IMAGES, make
from tests.engine.checkpoints import make_tokenizer
from tests.engine.family_runs import NUM_NEW_TOKENS
from tests.engine.reference import TIE

Parts = list[Any]
SQUARE = {"height": 28, "width": 28}
#: Arguments of image processors and processors by model type, and the special tokens, the placeholder first.
QWEN = (
    {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 6}},
    {},
    "<|image_pad|> <|video_pad|> <|vision_start|> <|vision_end|>",
)
PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "llava": (
        {"size": {"shortest_edge": 28}, "crop_size": SQUARE},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "<image>",
    ),
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": ({"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 6}, "patch_size": 14}, {}, QWEN[2]),
}
#: Values of configurations, beside those of ops.models.checkpoints.
VALUES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"vision_config": {"hidden_size": 48, "embed_dim": 32}},
    "qwen3_vl": {"vision_config": {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}},
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}FRAME"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def picture(seed: int, height: int = 40, width: int = 60) -> np.ndarray[Any, Any]:
    """A picture of noise."""
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def frame_of(special: list[str]) -> str:
    """What a template puts in the place of a picture."""
    return f"<|vision_start|>{special[0]}<|vision_end|>" if "<|vision_start|>" in special else special[0]


def make_with_pictures(folder: Path, model_type: str) -> Path:
    """Write the checkpoint and the files of its processor; return the folder."""
    of_images, of_processor, special = PROCESSORS[model_type]
    tokenizer = make_tokenizer()
    names = special.split()
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))
    tokenizer.chat_template = TEMPLATE.replace("FRAME", frame_of(names))
    ids_of = {"image_token_id": ids[names[0]]}
    for name, token in (
        ("video", "<|video_pad|>"),
        ("vision_start", "<|vision_start|>"),
        ("vision_end", "<|vision_end|>"),
    ):
        if token in ids:
            ids_of[f"{name}_token_id"] = ids[token]
    make(folder, WITH_IMAGES, model_type, **ids_of, **VALUES.get(model_type, {}))
    tokenizer.save_pretrained(folder)
    image_processor = getattr(transformers, IMAGE_PROCESSOR_MAPPING_NAMES[model_type]["pil"])(**of_images)
    image_processor.save_pretrained(folder)
    kind = getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": kind.__name__, **of_processor}))
    return folder


def prompts() -> list[Parts]:
    """With two pictures, one, none and equal ones, behind equal texts, at the beginning and the end."""
    words = " ".join(f"word {i}" for i in range(12))
    one, two = picture(1), picture(2, 70, 40)
    return [
        ["hello ", one, " and then ", two, " the end of it"],
        [words, one],
        ["only a text, ", words],
        ["hello ", two, " and then ", two, " the end of it"],
        ["hello ", one, " and then ", two, " the end of it", words],
        ["only a text, ", words, two, words],
        [one, two],
        ["only a text, ", words, one, words],
        ["hello ", one, " and then ", one, " the end of it"],
        ["only a text, ", words, one, words, "!"],
    ]


class PictureReference:
    """transformers' whole model of a checkpoint, and what it generates greedily for prompts with pictures."""

    def __init__(self, folder: Path, model_type: str) -> None:
        self.folder = folder
        self.model = getattr(transformers, WITH_IMAGES[model_type]).from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = open_processor(folder)
        self.frame = frame_of(PROCESSORS[model_type][2].split())

    def inputs(self, parts: Parts) -> dict[str, Any]:
        """The processor's, of a prompt."""
        from PIL import Image

        text = "".join(part if isinstance(part, str) else self.frame for part in parts)
        pictures = [Image.fromarray(part) for part in parts if not isinstance(part, str)]
        return dict(self.processor(text=[text], images=pictures or None, return_tensors="pt"))

    @cached_property
    def answers(self) -> list[tuple[list[int], list[float]]]:
        """Of `prompts`."""
        return [self.answer(parts, NUM_NEW_TOKENS) for parts in prompts()]

    def unexplained(self, completions: list[Completion]) -> list[str]:
        """Differences from the answers, save where the two best logits tie within TIE."""
        found = []
        for i, ((answer, margins), completion) in enumerate(zip(self.answers, completions, strict=True)):
            pairs = zip(answer, completion.token_ids, strict=False)
            at = next((j for j, (wanted, got) in enumerate(pairs) if wanted != got), None)
            if completion.error or (at is not None and margins[at] > TIE):
                found.append(f"prompt {i}, token {at}: {completion.error or completion.token_ids} for {answer}")
        return found

    @torch.inference_mode()
    def answer(self, parts: Parts, num_new_tokens: int) -> tuple[list[int], list[float]]:
        """Greedy tokens, and how far each was ahead of the next best."""
        inputs = self.inputs(parts)
        found, margins = [], []
        for _ in range(num_new_tokens):
            logits = self.model(**inputs, use_cache=False).logits[0, -1]
            best = logits.topk(2)
            found.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            for name in inputs:
                if name in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"):
                    more = {"input_ids": found[-1], "attention_mask": 1}.get(name, 0)
                    inputs[name] = torch.cat([inputs[name], torch.tensor([[more]])], dim=1)
        return found, margins
