"""A small random checkpoint of a model that reads pictures, with its processor, and transformers' greedy answers."""

import inspect
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from engine import Completion, ConfigError, Engine
from engine.run.forward.pictures.reader import open_processor
from ops.models.checkpoints import WITH_IMAGES, make
from tests.engine.architectures import SERVED
from tests.engine.checkpoints import make_tokenizer
from tests.engine.families import GEMMA3_LAYERS
from tests.engine.family_runs import GREEDY, NUM_NEW_TOKENS, config_of
from tests.engine.reference import TIE

Parts = list[Any]
PLAIN = frozenset({"bos_token", "eos_token", "pad_token", "unk_token", "sep_token"})
SQUARE = {"height": 28, "width": 28}
PIXELS = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 6}}


@dataclass(frozen=True)
class Model:
    """What a type's checkpoint needs: arguments of its image processor, of its processor, of its configuration."""

    of_images: dict[str, Any] = field(default_factory=dict)
    of_processor: dict[str, Any] = field(default_factory=dict)
    of_config: dict[str, Any] = field(default_factory=dict)
    frame: str = "({})"


MODELS: dict[str, Model] = {
    "llava": Model(
        {"size": {"shortest_edge": 28}, "crop_size": SQUARE},
        {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "qwen2_vl": Model(PIXELS, {}, {"vision_config": {"hidden_size": 48, "embed_dim": 32}}),
    "qwen2_5_vl": Model(PIXELS),
    "qwen3_vl": Model(
        {**PIXELS, "patch_size": 14},
        {},
        {"vision_config": {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}},
    ),
}
ONE = {"size": SQUARE}
OF_QWEN: tuple[dict[str, Any], dict[str, Any]] = ({**PIXELS, "patch_size": 14}, {})
GRID_16 = {"vision_config": {"num_position_embeddings": 16}}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    "head_dim": 16,
}
CUT = {"size": {"shortest_edge": 28}, "crop_size": SQUARE}
TILES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 28}}
OF_CLIP = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
GRID = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
LONG = {"text_config": {"max_position_embeddings": 2048}}
MODELS |= {
    "step3p7": Model({}, {}, LONG),
    "got_ocr2": Model(
        {"size": {"height": 1024, "width": 1024}},
        {},
        {**LONG, "vision_config": {"image_size": 1024, "patch_size": 16}},
    ),
    "gemma4_unified": Model(
        {"max_soft_tokens": 70},
        {},
        {
            "text_config": {
                **SERVED["gemma4_unified_text"],
                "sliding_window": 400,
                "use_bidirectional_attention": "vision",
            },
            "vision_config": {
                "model_type": "gemma4_unified_vision",
                "mm_embed_dim": 48,
                "output_proj_dims": 48,
                "mm_posemb_size": 64,
            },
        },
    ),
    "deepseek_vl_hybrid": Model(
        {**ONE, "high_res_size": SQUARE},
        {"num_image_tokens": 4},
        {"high_res_vision_config": {"global_attn_indexes": [0, 1]}},
    ),
    "aria": Model(
        {"max_image_size": 490},
        {"size_conversion": {"980": 4}},
        {"projector_patch_to_query_dict": {"4900": 4}, "vision_config": {"image_size": 980}},
    ),
    "aya_vision": Model(
        {**ONE, "max_patches": 4}, {"patch_size": 14, "img_size": 28, "downsample_factor": 2}
    ),
    "cohere2_vision": Model({**ONE, "patch_size": 1}),
    "cosmos3_edge": Model({**PIXELS, "patch_size": 14}),
    "deepseek_vl": Model(ONE, {"num_image_tokens": 4}),
    "gemma3": Model(
        ONE, {"image_seq_length": 4}, {"text_config": {**GEMMA3_LAYERS, "sliding_window": 100}}
    ),
    "hunyuan_vl": Model(
        {**PIXELS, "patch_size": 14}, frame="<image_start_token>{}<image_end_token>"
    ),
    "idefics2": Model({"size": {"shortest_edge": 28, "longest_edge": 56}}, {"image_seq_len": 4}),
    "idefics3": Model(TILES, {"image_seq_len": 1}),
    "internvl": Model(
        ONE,
        {"image_seq_length": 1},
        {"vision_config": {"image_size": [28, 28], "patch_size": [14, 14]}},
    ),
    "janus": Model(ONE, {"num_image_tokens": 4}),
    "kimi_k25": Model(
        {"size": {"max_height": 56, "max_width": 56}}, {}, {"projection_hidden_size": 32}
    ),
    "lfm2_vl": Model(
        {
            "tile_size": 28,
            "encoder_patch_size": 14,
            "max_num_patches": 16,
            "min_image_tokens": 1,
            "max_image_tokens": 4,
        },
        {},
        {"vision_config": {"num_patches": 16}, "text_config": SERVED["lfm2"]},
    ),
    "gemma4": Model(
        {"max_soft_tokens": 70},
        {},
        {
            "text_config": {
                **SERVED["gemma4_text"],
                "sliding_window": 400,
                "use_bidirectional_attention": "vision",
            },
            "vision_config": {
                **VISION,
                "model_type": "gemma4_vision",
                "position_embedding_size": 64,
            },
        },
    ),
    "lighton_ocr": Model(
        {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}},
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "llava_next": Model({**CUT, **GRID}, OF_CLIP, GRID),
    "llava_next_video": Model({**CUT, **GRID}, OF_CLIP, GRID),
    "llava_onevision": Model({**ONE, **GRID}, {"num_image_tokens": 4}, GRID),
    "mistral3": Model(
        {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}},
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "mistral_large4": Model(
        {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}},
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "molmo2": Model({**ONE, "overlap_margins": [0, 0]}),
    "muse_glimmer": Model(PIXELS, {}, {"out_hidden_size": 128, "projector_hidden_size": 64}),
    "ovis2": Model(ONE, {"image_seq_length": 4}),
    "paddleocr_vl": Model(PIXELS),
    "perception_lm": Model({**ONE, "tile_size": 28}, {"patch_size": 14, "pooling_ratio": 2}),
    "qianfan_ocr": Model(
        ONE,
        {"image_seq_length": 1},
        {"vision_config": {"image_size": [28, 28], "patch_size": [14, 14]}},
    ),
    "smolvlm": Model(TILES, {"image_seq_len": 1}),
    "video_llava": Model(CUT, OF_CLIP),
    "vipllava": Model(CUT, OF_CLIP, {"vision_feature_layers": [0, 1]}),
    **dict.fromkeys(
        (
            "glm46v",
            "glm4v",
            "glm4v_moe",
            "glm_ocr",
            "exaone4_5",
            "cohere_compass",
            "video_llama_3",
            "lfm3_vl",
        ),
        Model(PIXELS),
    ),
    **dict.fromkeys(("hyperclovax_vision_v2", "minimax_m3_vl"), Model(PIXELS)),
    "qwen3_5": Model(*OF_QWEN, {**GRID_16, "text_config": SERVED["qwen3_5_text"]}),
    "qwen3_5_moe": Model(*OF_QWEN, {**GRID_16, "text_config": SERVED["qwen3_5_moe_text"]}),
    "qwen3_vl_moe": Model(*OF_QWEN, GRID_16),
}
OMNI = "<vision_bos_token>{}<vision_eos_token>"
MODELS |= {
    "qwen2_5_omni_thinker": Model(PIXELS, frame=OMNI),
    "qwen3_omni_moe_thinker": Model(
        {**PIXELS, "patch_size": 14}, {}, {"vision_config": {"num_position_embeddings": 16}}, OMNI
    ),
}
#: Types whose checkpoints name the processor of another.
LIKE = {
    "glm4v_moe": "glm4v",
    "glm_ocr": "glm46v",
    "qwen2_5_omni_thinker": "qwen2_5_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe",
    "qwen3_vl_moe": "qwen3_vl",
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


def marked(processor: Any) -> str:
    """What stands for a picture in a processor's texts."""
    found: str = getattr(processor, "image_placeholder_token", processor.image_token)
    return found


def make_with_pictures(folder: Path, model_type: str) -> Path:
    """Write the checkpoint and the files of its processor; return the folder. Raises whatever transformers does."""
    model = MODELS.get(model_type, Model())
    like = LIKE.get(model_type, model_type)
    kind: Any = getattr(transformers, PROCESSOR_MAPPING_NAMES[like])
    tokenizer = _tokenizer_for(kind)
    tokenizer.save_pretrained(folder)
    processor: Any = IMAGE_PROCESSOR_MAPPING_NAMES[like]
    processor = getattr(transformers, processor.get("pil") or processor["torchvision"])(
        **model.of_images
    )
    processor.save_pretrained(folder)
    values = {"processor_class": kind.__name__, **model.of_processor}
    (folder / "processor_config.json").write_text(json.dumps(values))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    opened = open_processor(folder)
    from PIL import Image

    framed = model.frame.format(marked(opened))
    made = opened(
        text=[framed], images=[Image.fromarray(picture(0, 100, 100))], return_tensors="pt"
    )
    found = [int(each) for each in made["input_ids"][0]]
    special = Counter(each for each in found if each >= len(make_tokenizer()))
    said = [getattr(each, "image_token_id", None) for each in (tokenizer, opened)]
    opened.image_token_id = next(
        (each for each in said if each in found), special.most_common(1)[0][0]
    )
    ids = {
        name + end: token_id
        for name in TOKEN_NAMES
        for end in ("_id", "_index")
        if isinstance(
            token_id := getattr(opened, f"{name}_id", None)
            or getattr(tokenizer, f"{name}_id", None),
            int,
        )
    }
    known = CONFIG_MAPPING[model_type]()
    for ours, theirs in (("vision_start", "vision_bos"), ("vision_end", "vision_eos")):
        if f"<{theirs}_token>" in tokenizer.get_vocab():
            ids[f"{ours}_token_id"] = tokenizer.convert_tokens_to_ids(f"<{theirs}_token>")
    ids = {name: token_id for name, token_id in ids.items() if hasattr(known, name)}
    make(folder, WITH_IMAGES, model_type, **ids, **model.of_config)
    tokenizer.chat_template = TEMPLATE.replace("FRAME", model.frame.format(marked(opened)))
    tokenizer.save_pretrained(folder)
    return folder


TOKEN_NAMES = """
video_token audio_token vision_start_token vision_end_token image_start_token image_end_token boi_token eoi_token
image_newline_token image_token
""".split()  # noqa: SIM905


def _tokenizer_for(kind: Any) -> Any:
    """Make a tokenizer with all special tokens that a processor's source speaks of."""
    source = Path(inspect.getsourcefile(kind) or "").read_text()
    tokenizer = make_tokenizer()
    names = {*re.findall(r"tokenizer(?:\.|, \")(\w+_token)\b", source)} - PLAIN
    texts = sorted({*re.findall(r"\"(<[^\" {]{1,40}>|\[[A-Z_]+\])\"", source)})
    texts += [
        text for name, text in vars(kind).items() if name.endswith("_TOKEN") and text not in texts
    ]
    tokenizer.add_special_tokens(
        {"additional_special_tokens": texts + [f"<{name}>" for name in sorted(names)]}
    )
    named = {name: f"<{name}>" for name in sorted(names)}
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, extra_special_tokens=named, **ends
    )


def prompts() -> list[Parts]:
    """With two pictures, one, none and equal ones, behind equal texts, at the beginning and the end."""
    words = " ".join(f"word {i}" for i in range(12))
    one, two = picture(1, 80, 120), picture(2, 120, 70)
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


def compared(folder: Path, model_type: str) -> str:
    """Say what comes of a type with pictures: "exact", or another word with the reason."""
    try:
        reference = PictureReference(make_with_pictures(folder, model_type), model_type)
    except Exception as error:  # noqa: BLE001 - whatever it is, the next model has its turn
        return f"not made ({type(error).__name__})"
    most = (
        MODELS.get(model_type, Model())
        .of_config.get("text_config", {})
        .get("max_position_embeddings", 512)
    )
    changes = {
        "max_num_batched_tokens": 200,
        "max_num_seqs": 6,
        "max_model_len": most,
        "block_bytes": 1 << 16,
    }
    try:
        with Engine(config_of(folder, "whole", **changes)) as engine:
            if not engine.reads_pictures:
                return "not read"
            differences = reference.unexplained(engine.generate(prompts(), GREEDY))
    except ConfigError:  # as its text is
        return "refused"
    except Exception as error:  # noqa: BLE001 - it has no name, which is what is looked for
        return f"WRONG: {type(error).__name__}: {error}"
    return f"WRONG: {differences[0]}" if differences else "exact"


class PictureReference:
    """transformers' whole model of a checkpoint, and what it generates greedily for prompts with pictures."""

    def __init__(self, folder: Path, model_type: str) -> None:
        self.folder = folder
        self.model = (
            getattr(transformers, WITH_IMAGES[model_type])
            .from_pretrained(folder, dtype=torch.float32)
            .eval()
        )
        self.processor = open_processor(folder)
        self.frame = MODELS.get(model_type, Model()).frame.format(marked(self.processor))

    def inputs(self, parts: Parts) -> dict[str, Any]:
        """The processor's, of a prompt."""
        from PIL import Image

        text = "".join(part if isinstance(part, str) else self.frame for part in parts)
        pictures = [Image.fromarray(part) for part in parts if not isinstance(part, str)]
        more = (
            {"return_mm_token_type_ids": True}
            if hasattr(self.model.base_model, "get_rope_index")
            else {}
        )
        if not pictures:  # which some processors want
            return dict(self.processor.tokenizer([text], return_tensors="pt"))
        return dict(self.processor(text=[text], images=pictures, return_tensors="pt", **more))

    @cached_property
    def answers(self) -> list[tuple[list[int], list[float]]]:
        """Of `prompts`."""
        return [self.answer(parts, NUM_NEW_TOKENS) for parts in prompts()]

    def unexplained(self, completions: list[Completion]) -> list[str]:
        """Differences from the answers, save where the two best logits tie within TIE.

        One pass over tokens of which each is the likeliest shows that they are the answer; see Reference.
        """
        if "answers" not in vars(self):
            passes = list(map(self._chosen, prompts(), completions))
            if None not in passes:
                self.answers = [answer for answer in passes if answer is not None]
        found = []
        for i, ((answer, margins), completion) in enumerate(
            zip(self.answers, completions, strict=True)
        ):
            pairs = zip(answer, completion.token_ids, strict=False)
            at = next((j for j, (wanted, got) in enumerate(pairs) if wanted != got), None)
            if completion.error or (at is not None and margins[at] > TIE):
                found.append(
                    f"prompt {i}, token {at}: {completion.error or completion.token_ids} for {answer}"
                )
        return found

    @torch.inference_mode()
    def _chosen(self, parts: Parts, completion: Completion) -> tuple[list[int], list[float]] | None:
        """Return a completion's tokens as `answer` does; None if some is not the likeliest there."""
        token_ids = completion.token_ids
        if len(token_ids) != NUM_NEW_TOKENS or self.model.config.image_token_id in token_ids:
            return None
        inputs = self.inputs(parts)
        for token_id in token_ids[:-1]:
            append_token(inputs, token_id)
        best = self.model(**inputs, use_cache=False).logits[0, -len(token_ids) :].topk(2)
        if best.indices[:, 0].tolist() != token_ids:
            return None
        return token_ids, (best.values[:, 0] - best.values[:, 1]).tolist()

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
            if found[-1] == self.model.config.image_token_id:
                break  # transformers would look for its features
            append_token(inputs, found[-1])
        return found, margins


def append_token(inputs: dict[str, Any], token_id: int) -> None:
    """Add a token behind a prompt's."""
    for name in inputs:
        if name in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"):
            more = {"input_ids": token_id, "attention_mask": 1}.get(name, 0)
            inputs[name] = torch.cat([inputs[name], torch.tensor([[more]])], dim=1)
