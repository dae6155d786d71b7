"""Greedy answers of the demo model are the same at batch 1, 8, 64 and 256; and the check can fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ops.bench.gpu.accuracy import DEMO, LONGEST_ANSWER, Rows, compare, engine_answers
from ops.bench.padded import pad_left
from ops.demo.prompts import BARE_PROMPT

NUM_ROWS = 260  # more than the largest batch
FIRST_ROWS = {1: 40, 8: 100}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small lose time on more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_answer_is_the_same_at_every_batch_size() -> None:
    """Few rows at the small sizes: one alone takes as long as twenty in company."""
    rows = Rows.read(NUM_ROWS)
    outcomes = compare(engine_answers(device="cpu"), rows, first_rows=FIRST_ROWS)
    sizes = {outcome.batch: outcome.num_rows for outcome in outcomes}
    assert sizes == {**FIRST_ROWS, 64: NUM_ROWS, 256: NUM_ROWS}
    assert [outcome.different_rows for outcome in outcomes] == [[], [], [], []]
    assert outcomes[-1].accuracy > 0.97


def test_bfloat16_answers_as_well() -> None:
    """Its logits move with the batch: now and then an answer may, too."""
    rows = Rows.read(100)
    for outcome in compare(engine_answers(device="cpu", dtype="bfloat16"), rows, (8, 64)):
        assert outcome.accuracy > 0.97
        assert len(outcome.different_rows) <= 1


def test_batching_that_sees_its_padding_is_caught() -> None:
    """A toy that pads prompts on the left and masks nothing: right alone, disturbed in company."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)

    @torch.inference_mode()
    def answer(texts: Sequence[str], batch: int) -> list[str]:
        prompts = tokenizer([BARE_PROMPT.format(text=text) for text in texts])["input_ids"]
        answers: list[str] = []
        for start in range(0, len(prompts), batch):
            token_ids, mask = pad_left(prompts[start : start + batch], pad_token_id=tokenizer.pad_token_id)
            output = model.generate(
                token_ids,
                attention_mask=torch.ones_like(mask),
                max_new_tokens=LONGEST_ANSWER,
                do_sample=False,
            )
            new = output[:, token_ids.shape[1] :]
            answers += tokenizer.batch_decode(new, skip_special_tokens=True)
        return answers

    alone, together = compare(answer, Rows.read(16), (1, 8))
    assert alone.accuracy > 0.9
    assert alone.different_rows, together
