"""Embeddings beside sentence-transformers' own: the same numbers, and the processor time of both.

    pip install sentence-transformers
    OMP_NUM_THREADS=1 python -m ops.embeddings [--texts 400] [--rounds 5] [--hidden 256] [--model FOLDER]

Without --model on random checkpoints of two kinds, in float32: a Qwen3 whose last token is pooled and
normalised, and a Llama without LM head whose tokens' mean is taken. Texts have all lengths up to beyond what
the checkpoint reads. Times are taken in alternation, the first round left out. The exit status is 1 where a
number differs by more than 1e-5.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import Engine, EngineConfig, PoolingParams
from tests.engine.embedding_models import like_qwen3_embedding, llama_body

WORDS = ("quick", "brown", "fox", "März", "1987", "ångström", "jugs", "Œuvre", "名前", "q", "the lazy dog")
TOLERANCE = 1e-5


def texts(num_texts: int, most_words: int) -> list[str]:
    """As many, of one word to most_words."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, most_words))) for _ in range(num_texts)]


def check(name: str, engine: Engine, reference: Any, asked: list[str]) -> float:
    """The largest difference, in whatever both can be asked."""
    prompts = [None, *(name for name, text in reference.prompts.items() if text)]
    found = 0.0
    for prompt in prompts:
        for dimensions in (None, 16):
            params = PoolingParams(prompt_name=prompt, dimensions=dimensions)
            own = np.array([each.embedding for each in engine.embed(asked, params)])
            options = {} if dimensions is None else {"truncate_dim": 16, "normalize_embeddings": True}
            theirs = reference.encode(asked, prompt_name=prompt, **options)
            difference = float(np.abs(own - theirs).max())
            print(f"{name}, prompt {prompt}, dimensions {dimensions}: {difference:.1e}")
            found = max(found, difference)
    return found


def seconds(run: Callable[[], object]) -> float:
    """Processor time of a call."""
    began = time.process_time()
    run()
    return time.process_time() - began


def compare(folder: Path, num_texts: int, num_rounds: int) -> float:
    """Print what both give and take; return the largest difference."""
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(str(folder), device="cpu")
    asked = texts(num_texts, 60)
    # prefixes cached from the round before would cost nothing
    config = EngineConfig(str(folder), dtype="float32", device="cpu", enable_prefix_caching=False)
    with Engine(config) as engine:
        difference = check(folder.name, engine, reference, asked)
        times = [
            (seconds(lambda: engine.embed(asked)), seconds(lambda: reference.encode(asked)))
            for _ in range(num_rounds + 1)
        ][1:]
    own, theirs = (statistics.median(each) for each in zip(*times, strict=True))
    ratios = ", ".join(f"{other / mine:.2f}" for mine, other in times)
    print(
        f"{folder.name}: {num_texts / own:.0f} embeddings/s, sentence-transformers {num_texts / theirs:.0f}; "
        f"its time ÷ ours {ratios}"
    )
    return difference


def main() -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        folders = [options.model]
        if options.model is None:
            folders = [
                like_qwen3_embedding(Path(root) / "last token", hidden_size=options.hidden),
                llama_body(Path(root) / "mean", hidden_size=options.hidden),
            ]
        differences = [compare(folder, options.texts, options.rounds) for folder in folders]
    print(f"largest difference: {max(differences):.1e}")
    return int(max(differences) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
