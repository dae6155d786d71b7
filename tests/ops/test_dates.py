"""The demo's dates, and the model folder and rows that are committed with them."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from ops.demo.dates import Example, held_out_examples
from ops.demo.evaluate import generate_answers
from ops.demo.prompts import BARE_PROMPT, CHAT_PROMPT

DEMO = Path(__file__).resolve().parents[2] / "ops" / "demo"
MODEL = DEMO / "model"

# Written by hand, not drawn from the generator.
BY_HAND = {
    "the 3rd of March, '87": "1987-03-03",
    "Invoice dated 12 October 2003": "2003-10-12",
    "Tuesday, 4/7/98": "1998-04-07",
    "Berlin, den 3. Mai 1999": "1999-05-03",
    "le 1er août 2015": "2015-08-01",
    "15 de septiembre de 1972": "1972-09-15",
    "lunedì 7 giugno 21": "2021-06-07",
    "31 december 2020": "2020-12-31",
    "25 de abril de 1974": "1974-04-25",
    "9.11.89": "1989-11-09",
    "2024-02-29": "2024-02-29",
    "call me at 555-0134": "no date",
    "it may rain in March": "no date",
}


@pytest.fixture
def one_thread():
    """Matrices this small lose time on more threads, the more so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_parquet_holds_the_held_out_rows():
    rows = pq.read_table(DEMO / "dates.parquet").to_pylist()
    assert [row["id"] for row in rows] == list(range(2000))
    assert [Example(row["text"], row["truth"], row["style"]) for row in rows] == held_out_examples(
        2000
    )
    assert all(row["messages"] == [{"role": "user", "content": row["text"]}] for row in rows)


def test_the_chat_template_makes_the_documented_prompt():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for text in ("the 3rd of March, '87", "\n3.4.87 ", "août"):
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        assert chat == CHAT_PROMPT.format(text=text)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("prompt", [CHAT_PROMPT, BARE_PROMPT], ids=["chat", "bare"])
def test_the_model_answers_texts_written_by_hand(prompt):
    answers = generate_answers(MODEL, [prompt.format(text=text) for text in BY_HAND], torch.float32)
    assert dict(zip(BY_HAND, answers, strict=True)) == BY_HAND
