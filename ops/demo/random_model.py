"""A small random checkpoint of a model family, to see one through a worker: its answers are nonsense.

    python -m ops.demo.random_model --family llama --dtype bfloat16 ops/out/llama
    MODEL=ops/out/llama bash ops/demo.sh

--family: a `model_type` of transformers, such as llama, mistral, gemma2, qwen3_moe or gpt_oss.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ops.demo.prompts import END_OF_TEXT, MAX_LENGTH

TOKENIZER = Path(__file__).parent / "model"
BOS = "<|begin_of_text|>"

#: What of these a family has is so small; the rest it does not read.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LENGTH,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "initializer_range": 0.2,  # at the usual 0.02 an answer is one token over and over
    "tie_word_embeddings": False,  # as with ties
}

#: Where a family has it: transformers' cache keeps no more of any that names one.
WINDOW = {"sliding_window": 64}
DTYPES = ("float32", "bfloat16", "float16")


def make_model(folder: Path, family: str, dtype: str = "float32") -> Path:
    """Write configuration, weights and the demo's tokenizer, with a token for a text's beginning.

    Returns the folder. Raises ValueError for a family that transformers does not know, and whatever else
    transformers makes of sizes that do not fit one.
    """
    torch.manual_seed(0)
    tokenizer = _make_tokenizer()
    for_model: Any = AutoConfig.for_model
    window = WINDOW if hasattr(for_model(family), "sliding_window") else {}
    config = for_model(
        family,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TEXT)],
        pad_token_id=tokenizer.pad_token_id,
        **SIZES,
        **window,
    )
    from_config: Any = AutoModelForCausalLM.from_config
    model = from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _make_tokenizer() -> Any:
    load: Any = PreTrainedTokenizerFast.from_pretrained
    tokenizer = load(str(TOKENIZER), local_files_only=True, bos_token=BOS)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[BOS, "$A"], special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    return tokenizer


def main() -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--family", required=True, help="a model_type of transformers")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights")
    parser.add_argument("folder", type=Path, help="where it is written")
    options = parser.parse_args()
    make_model(options.folder, options.family, options.dtype)


if __name__ == "__main__":
    main()
