"""Tokens per second of transformers' `generate` on one workload file, all sequences in one padded batch.

usage: python -m ops.bench.padded --model FOLDER --workload W1.json [--threads 2] [--out out.json]

Shorter prompts are padded on the left, and every sequence runs as long as the longest.
"""

import argparse
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ops.bench.workload import parse_options, run


def pad_left(prompts: list[list[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both [seqs, longest] int64."""
    longest = max(map(len, prompts))
    token_ids = torch.full((len(prompts), longest), pad_token_id)
    mask = torch.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):
        token_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return token_ids, mask


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """Complete all prompts greedily in one batch; return the tokens asked for of each."""
    token_ids, mask = pad_left(prompts, pad_token_id=0)
    tokens = model.generate(
        token_ids, attention_mask=mask, do_sample=False, max_new_tokens=max(lengths), pad_token_id=0
    )
    new = tokens[:, token_ids.shape[1] :].tolist()
    return [row[:length] for row, length in zip(new, lengths, strict=True)]


def main() -> None:
    """Measure once and print a RESULT line, or take turns."""
    options = parse_options(
        argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    )
    torch.set_num_threads(options.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    )
    model.generation_config.eos_token_id = None  # to the full length
    run(options, "transformers", partial(generate, model))


if __name__ == "__main__":
    main()
