"""Output tokens per second of native families beside Qwen3's, at q54m's sizes.

    python -m ops.bench.families
    python -m ops.bench.families --threads 1 --cpu-time  # where others share the machine

Random float32 checkpoints on a CPU. In each round a family and Qwen3 answer the same sequences of W1, one
right after the other; a row gives the rounds' ratios.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine import Engine, EngineConfig
from ops.bench.engine import generate
from ops.bench.make import SHAPES, make_workloads, save_tokenizer
from ops.bench.report import print_machine
from ops.bench.table import print_table, spread

BASE = "qwen3"
FAMILIES = ("llama", "mistral", "qwen2", "phi3", "olmo2", "gemma2", "gemma3_text")


def make_family(folder: Path, family: str) -> Path:
    """Write a checkpoint of transformers' model_type in q54m's sizes; return its folder."""
    shape = SHAPES["q54m"]
    torch.manual_seed(0)
    for_model: Any = AutoConfig.for_model
    config = for_model(
        family,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
        eos_token_id=shape.vocab_size - 1,
        pad_token_id=0,
        bos_token_id=None,
    )
    from_config: Any = AutoModelForCausalLM.from_config
    from_config(config, dtype=torch.float32).save_pretrained(folder)
    save_tokenizer(folder, shape)
    return folder


def open_engine(folder: Path) -> Engine:
    """With a pool that holds W1 twice, and no prefix cache, so that a round can be run again."""
    return Engine(EngineConfig(str(folder), kv_cache_bytes=2**30, enable_prefix_caching=False))


def tokens_per_second(
    engine: Engine, prompts: list[list[int]], lengths: list[int], clock: Callable[[], float]
) -> float:
    """Of all answers together."""
    started = clock()
    generate(engine, prompts, lengths)
    return sum(lengths) / (clock() - started)


def main() -> None:
    """Compare the families one after the other; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--families", nargs="*", default=FAMILIES, help="model_types of transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=16, help="of W1's 64")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of this process, not of the clock")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    print_machine()
    workload = next(each for each in make_workloads() if each.name == "W1")
    prompts, lengths = workload.prompts[: options.sequences], workload.lengths[: options.sequences]
    rows = []
    with tempfile.TemporaryDirectory() as place, open_engine(make_family(Path(place, BASE), BASE)) as base:
        generate(base, prompts[:4], [8] * 4)
        for family in options.families:
            with open_engine(make_family(Path(place, family), family)) as engine:
                generate(engine, prompts[:4], [8] * 4)
                pairs = [
                    tuple(tokens_per_second(each, prompts, lengths, clock) for each in (engine, base))
                    for _ in range(options.rounds)
                ]
            own, others = zip(*pairs, strict=True)
            ratios = [mine / other for mine, other in pairs]
            rows.append([family, spread(own, 0), spread(others, 0), spread(ratios)])
            print(rows[-1], flush=True)
    print_table(["", "tok/s", f"{BASE}'s", "ratio"], rows)


if __name__ == "__main__":
    main()
