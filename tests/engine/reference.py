"""What transformers generates greedily, and the check of an engine's completions against it."""

import random
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import Completion

NUM_PROMPTS = 44
NUM_NEW_TOKENS = 24
TIE = 1e-4


def mixed_prompts(seed: int) -> list[list[int]]:
    """Prompts of 1 to 170 tokens, some behind common prefixes that end inside and at the end of a block."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, 500) for _ in range(length)] for length in (0, 0, 21, 48)]
    lengths = [1, 2, 15, 16, 17, 32, 33, 120] + [
        rng.randrange(1, 70) for _ in range(NUM_PROMPTS - 8)
    ]
    return [
        prefixes[i % len(prefixes)] + [rng.randrange(3, 500) for _ in range(length)]
        for i, length in enumerate(lengths)
    ]


class Reference:
    """transformers' model of one checkpoint in float32, with or without its cache, its prompts and greedy answers."""

    def __init__(
        self,
        folder: Path,
        prompts: list[list[int]] | None = None,
        *,
        num_new_tokens: int = NUM_NEW_TOKENS,
        use_cache: bool = True,
        kind: Any = AutoModelForCausalLM,
    ) -> None:
        self.folder, self.kind = folder, kind
        self.prompts = prompts or mixed_prompts(seed=len(folder.name))
        self._num_new_tokens, self._use_cache = num_new_tokens, use_cache

    @cached_property
    def model(self) -> PreTrainedModel:
        return self.kind.from_pretrained(self.folder, dtype=torch.float32).eval()

    @cached_property
    def answers(self) -> list[list[int]]:
        """So many greedy tokens for each prompt, end tokens ignored."""
        return [self._generate(prompt) for prompt in self.prompts]

    def _generate(self, prompt: list[int]) -> list[int]:
        self.model.generation_config.update(eos_token_id=None, forced_eos_token_id=None)
        output = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=self._num_new_tokens,
            do_sample=False,
            use_cache=self._use_cache,
        )
        return output[0, len(prompt) :].tolist()

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits [vocabulary] of the token that follows."""
        with torch.inference_mode():
            return self.model(torch.tensor([token_ids]), use_cache=False).logits[0, -1]

    def _chooses(self, prompt: list[int], token_ids: list[int]) -> bool:
        """Whether each of these tokens is the likeliest behind the prompt and the tokens before it."""
        if len(token_ids) != self._num_new_tokens:
            return False
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + token_ids[:-1]]), use_cache=False).logits[0]
        return logits[len(prompt) - 1 :].argmax(-1).tolist() == token_ids

    def unexplained(self, completions: list[Completion]) -> list[str]:
        """Differences from the answers, save where the reference's two best logits tie within TIE.

        Tokens of which each is the likeliest behind those before it are the greedy answer. One pass over all of them
        shows that, in place of one for each. Only if some is not, the reference generates answers of its own.
        """
        assert len(completions) == len(self.prompts)
        if "answers" not in vars(self):
            tokens = [completion.token_ids for completion in completions]
            if all(map(self._chooses, self.prompts, tokens)):
                self.answers = tokens
        found = []
        for i, (prompt, answer, completion) in enumerate(
            zip(self.prompts, self.answers, completions, strict=True)
        ):
            got = completion.token_ids
            if got == answer:
                continue
            at = next(
                (j for j, (a, b) in enumerate(zip(answer, got, strict=False)) if a != b), len(got)
            )
            best, second = self.logits(prompt + answer[:at]).topk(2).values.tolist()
            if len(got) != len(answer) or best - second > TIE:
                found.append(
                    f"prompt {i}, token {at}: {got[at : at + 3]} for {answer[at : at + 3]}"
                )
        return found
