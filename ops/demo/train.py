"""Train the demo model from nothing: `python ops/demo/train.py` writes model/ and dates.parquet beside it.

A Qwen3 of under one million parameters learns to answer a messy date with its ISO 8601 form, from texts that
`dates.py` makes; README.md in this folder says what was reached. The same machine, torch build and number of
threads give the same weights; others round differently and end a few rows away in accuracy.
"""

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

if __package__ in (None, ""):  # run as a file: find `ops` as `python -m ops.demo.train` does
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ops.demo.dates import Example, held_out_examples, training_examples
from ops.demo.evaluate import generate_answers, report
from ops.demo.prompts import (
    BARE_PROMPT,
    CHAT_PREFIX,
    CHAT_PROMPT,
    END_OF_TEXT,
    IM_END,
    MAX_LENGTH,
    SYSTEM_PROMPT,
    VOCAB_SIZE,
    save_tokenizer,
    train_tokenizer,
)

HERE = Path(__file__).resolve().parent
HELD_OUT_ROWS = 2000
TOKENIZER_TEXTS = 20_000
#: Batches cut from one sorted stretch of texts, so that a batch's rows are of similar length.
BUCKET_BATCHES = 16


@dataclass(frozen=True)
class Recipe:
    """What the training run may be told: `steps` updates of `batch_size` texts, `bare_share` of them without
    the chat template."""

    steps: int = 2200
    batch_size: int = 128
    bare_share: float = 0.25
    peak_learning_rate: float = 3e-3
    warmup_steps: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """Token ids [rows, length] padded on the right, and targets of that shape, -100 where none is learned."""

    token_ids: Tensor
    targets: Tensor


def main() -> int:
    """Train, save, and print the held-out accuracy of what was saved."""
    options = parse_options()
    recipe = Recipe(steps=options.steps)
    torch.set_num_threads(options.threads)
    torch.manual_seed(recipe.seed)
    held_out = held_out_examples(HELD_OUT_ROWS)
    examples = training_examples(held_out)
    tokenizer = learn_tokenizer(examples)
    model = Qwen3ForCausalLM(model_config(tokenizer))
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {options.threads} threads",
        flush=True,
    )
    fit(model, tokenizer, examples, recipe)
    options.out.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, options.out / "model")
    write_rows(held_out, options.out / "dates.parquet")
    print(f"training: {time.process_time() / 60:.1f} CPU minutes", flush=True)
    for dtype in (torch.float32, torch.bfloat16):
        for name, prompt in (("chat", CHAT_PROMPT), ("bare", BARE_PROMPT)):
            prompts = [prompt.format(text=example.text) for example in held_out]
            answers = generate_answers(options.out / "model", prompts, dtype)
            print(report(held_out, answers, f"{name} prompt, {dtype}"), flush=True)
    print(f"with evaluation: {time.process_time() / 60:.1f} CPU minutes", flush=True)
    return 0


def parse_options() -> argparse.Namespace:
    """Read the command line; the defaults are what the committed model was made with."""
    parser = argparse.ArgumentParser(
        description="Train the demo model and write its held-out rows."
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads; the committed model had 1"
    )
    parser.add_argument(
        "--steps", type=int, default=Recipe.steps, help="updates, for a shorter trial run"
    )
    parser.add_argument(
        "--out", type=Path, default=HERE, help="folder for model/ and dates.parquet"
    )
    return parser.parse_args()


def learn_tokenizer(examples: Iterator[Example]) -> Tokenizer:
    """Train the tokenizer on texts; the system prompt counts often, so that it takes fewer tokens."""
    sample = list(itertools.islice(examples, TOKENIZER_TEXTS))
    return train_tokenizer([e.text for e in sample] + [SYSTEM_PROMPT] * (TOKENIZER_TEXTS // 40))


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    """A Qwen3 as the 0.6B model is built, made small."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )


def fit(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, examples: Iterator[Example], recipe: Recipe
) -> None:
    """Train in float32 with AdamW, warm-up and cosine decay; the loss is on the answers' tokens alone."""
    prefix = torch.tensor([tokenizer.encode(CHAT_PREFIX).ids])
    optimizer = make_optimizer(model, recipe)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, recipe)
    )
    num_bare = round(recipe.batch_size * recipe.bare_share)
    chat = batches(tokenizer, examples, CHAT_PROMPT, recipe.batch_size - num_bare, recipe.seed)
    bare = batches(tokenizer, examples, BARE_PROMPT, num_bare, recipe.seed)
    losses: list[float] = []
    for step in range(1, recipe.steps + 1):
        optimizer.zero_grad()
        chat_loss = answer_loss(model, next(chat), prefix) * (1 - recipe.bare_share)
        chat_loss.backward()
        bare_loss = answer_loss(model, next(bare)) * recipe.bare_share
        bare_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(chat_loss.item() + bare_loss.item())
        if step % 100 == 0 or step == recipe.steps:
            loss, minutes = sum(losses[-100:]) / len(losses[-100:]), time.process_time() / 60
            print(f"step {step}: loss {loss:.4f}, {minutes:.1f} CPU min", flush=True)


def make_optimizer(model: Qwen3ForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices alone, none on the norms."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_learning_rate, betas=(0.9, 0.98))


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Rise linearly over the warm-up, then fall along a cosine to a hundredth of the peak."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))


def batches(
    tokenizer: Tokenizer, examples: Iterator[Example], prompt: str, batch_size: int, seed: int
) -> Iterator[Batch]:
    """Yield batches of examples in the prompt's format, rows of similar length together, batches shuffled."""
    rng = random.Random(seed)
    while True:
        stretch = sorted(
            itertools.islice(examples, batch_size * BUCKET_BATCHES), key=lambda e: len(e.text)
        )
        starts = list(range(0, len(stretch), batch_size))
        rng.shuffle(starts)
        for start in starts:
            yield make_batch(tokenizer, stretch[start : start + batch_size], prompt)


def make_batch(tokenizer: Tokenizer, examples: Sequence[Example], prompt: str) -> Batch:
    """Tokenize prompts and answers; a chat prompt goes without CHAT_PREFIX, which the batch shares."""
    prompt = prompt.removeprefix(CHAT_PREFIX)
    prompts = tokenizer.encode_batch([prompt.format(text=e.text) for e in examples])
    answers = tokenizer.encode_batch([e.truth + IM_END for e in examples])
    rows = [(p.ids, a.ids) for p, a in zip(prompts, answers, strict=True)]
    length = (
        max(len(p) + len(a) for p, a in rows) - 1
    )  # the last answer token is a target, never an input
    token_ids = torch.full((len(rows), length), tokenizer.token_to_id(END_OF_TEXT))
    targets = torch.full((len(rows), length), -100)
    for row, (p, a) in enumerate(rows):
        token_ids[row, : len(p) + len(a) - 1] = torch.tensor((p + a)[:-1])
        targets[row, len(p) - 1 : len(p) + len(a) - 1] = torch.tensor(a)
    return Batch(token_ids, targets)


def answer_logits(model: Qwen3ForCausalLM, batch: Batch, prefix: Tensor | None) -> Tensor:
    """Logits at the positions that have a target: [targets, vocabulary].

    `prefix` [1, length] comes before every row and is computed once for all of them; its keys and values stay
    in the graph. Padding is on the right, where no real token looks.
    """
    cache = None
    if prefix is not None:
        cache = model.model(prefix, use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(batch.token_ids))
    hidden = model.model(
        batch.token_ids, past_key_values=cache, use_cache=cache is not None
    ).last_hidden_state
    return model.lm_head(hidden[batch.targets != -100])


def answer_loss(model: Qwen3ForCausalLM, batch: Batch, prefix: Tensor | None = None) -> Tensor:
    """Mean cross-entropy over the answers' tokens."""
    return F.cross_entropy(
        answer_logits(model, batch, prefix), batch.targets[batch.targets != -100]
    )


def save_model(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder, weights rounded to bfloat16; `model` itself is rounded too."""
    folder.mkdir(exist_ok=True)
    stops = [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)]
    model.generation_config = GenerationConfig(
        eos_token_id=stops, pad_token_id=stops[1], do_sample=False
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # it is written for its owner alone
    save_tokenizer(tokenizer, folder)


def write_rows(examples: Sequence[Example], path: Path) -> None:
    """Write the held-out rows: id, text, the same text as chat messages, the true answer, the style."""
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    table = pa.table(
        {
            "id": pa.array(range(len(examples)), pa.int64()),
            "text": pa.array([e.text for e in examples], pa.string()),
            "messages": pa.array(
                [[{"role": "user", "content": e.text}] for e in examples], pa.list_(message)
            ),
            "truth": pa.array([e.truth for e in examples], pa.string()),
            "style": pa.array([e.style for e in examples], pa.string()),
        }
    )
    pq.write_table(table, path, compression="zstd")


if __name__ == "__main__":
    sys.exit(main())
