"""The demo model's accuracy, measured through transformers rather than our own engine."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ops.demo.dates import Example

LONGEST_ANSWER = 12  # tokens: YYYY-MM-DD and the end mark are 11


@torch.inference_mode()
def generate_answers(folder: Path, prompts: Sequence[str], dtype: torch.dtype) -> list[str]:
    """Answer the prompts greedily with the saved model; prompts of one length share a batch, unpadded."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    token_ids = tokenizer(list(prompts))["input_ids"]
    answers = [""] * len(prompts)
    by_length = sorted(range(len(prompts)), key=lambda row: len(token_ids[row]))
    for length, group in itertools.groupby(by_length, key=lambda row: len(token_ids[row])):
        rows = list(group)
        batch = torch.tensor([token_ids[r] for r in rows])
        output = model.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=LONGEST_ANSWER
        )
        texts = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
        for row, text in zip(rows, texts, strict=True):
            answers[row] = text
    return answers


def report(examples: Sequence[Example], answers: Sequence[str], title: str) -> str:
    """Accuracy by exact match, with the first mistakes."""
    wrong = [(e, a) for e, a in zip(examples, answers, strict=True) if a != e.truth]
    lines = [
        f"{title}: {1 - len(wrong) / len(examples):.2%} of {len(examples)} held-out rows are right"
    ]
    lines += [f"  {e.text!r}: {a!r}, true {e.truth!r}" for e, a in wrong[:20]]
    return "\n".join(lines)
