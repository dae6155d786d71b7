"""The demo's dates, and the model folder and rows that are committed with them."""

import datetime
import itertools
import json
import random
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from ops.demo.dates import (
    NO_DATE_ANSWER,
    Day,
    Example,
    held_out_examples,
    impossible_day,
    make_example,
    misspell,
    text_key,
    training_examples,
    write_year,
)
from ops.demo.evaluate import generate_answers
from ops.demo.prompts import BARE_PROMPT, CHAT_PREFIX, CHAT_PROMPT
from ops.demo.words import LANGUAGES

DEMO = Path(__file__).resolve().parents[2] / "ops" / "demo"
MODEL = DEMO / "model"
BLOCK_SIZE = 16  # the engine's default

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


def draw(count: int, seed: int = 3) -> list[Example]:
    rng = random.Random(seed)
    return [make_example(rng) for _ in range(count)]


def test_the_same_seed_gives_the_same_examples():
    assert draw(200) == draw(200)
    assert draw(200) != draw(200, seed=4)
    assert held_out_examples(50) == held_out_examples(2000)[:50]


def test_every_answer_is_a_real_day_or_no_date():
    for example in draw(5000):
        if example.truth != NO_DATE_ANSWER:
            assert str(datetime.date.fromisoformat(example.truth)) == example.truth


def test_no_date_is_the_answer_of_two_styles_and_of_no_other():
    for example in draw(5000):
        assert (example.truth == NO_DATE_ANSWER) == (example.style in ("none", "impossible")), example


def test_an_impossible_day_is_in_no_calendar():
    rng = random.Random(0)
    for day in (impossible_day(rng) for _ in range(500)):
        with pytest.raises(ValueError, match=r"day|isoformat"):
            datetime.date.fromisoformat(str(day))


def test_slashes_put_the_month_first_unless_that_number_can_only_be_a_day():
    for example in draw(20_000):
        found = re.search(r"(?<!\d)(\d\d?)/(\d\d?)/(\d{4}|\d\d)(?!\d)", example.text)
        if found and example.truth != NO_DATE_ANSWER:
            first, second = int(found[1]), int(found[2])
            month, day = (second, first) if first > 12 else (first, second)
            assert example.truth[5:] == f"{month:02d}-{day:02d}", example


def test_dots_and_dashes_put_the_day_first():
    for example in draw(20_000):
        found = re.search(r"(?<!\d)(\d\d?)([.-]) ?(\d\d?)\2 ?(\d{4}|\d\d)(?!\d)", example.text)
        if found and example.style in ("dmy-dot", "dmy-dash"):
            assert example.truth[5:] == f"{int(found[3]):02d}-{int(found[1]):02d}", example


def test_two_digits_of_a_year_pivot_at_fifty():
    rng = random.Random(0)
    for year in range(1900, 2100):
        written = {write_year(rng, Day(year, 1, 1)) for _ in range(60)}
        short = {text.lstrip("'’") for text in written} - {str(year)}
        assert short == ({f"{year % 100:02d}"} if 1950 <= year <= 2049 else set())


def test_no_spelling_names_two_months_even_misspelt():
    rng = random.Random(0)
    meaning: dict[str, int] = {}
    for language in LANGUAGES.values():
        for number, names in enumerate(language.months, start=1):
            misspelt = [misspell(rng, names[0]) for _ in range(40)] if len(names[0]) >= 6 else []
            for name in (*names, *misspelt):
                assert meaning.setdefault(name.casefold(), number) == number, name


def test_training_never_shows_a_held_out_text():
    held_out = held_out_examples(2000)
    banned = {text_key(example.text) for example in held_out}
    assert len(banned) == 2000
    assert text_key(held_out[0].text.upper() + "  ") in banned, "case and spaces make no new text"
    assert not any(text_key(e.text) in banned for e in itertools.islice(training_examples(held_out), 20_000))


def test_the_parquet_holds_the_held_out_rows():
    rows = pq.read_table(DEMO / "dates.parquet").to_pylist()
    assert [row["id"] for row in rows] == list(range(2000))
    assert [Example(row["text"], row["truth"], row["style"]) for row in rows] == held_out_examples(2000)
    assert all(row["messages"] == [{"role": "user", "content": row["text"]}] for row in rows)


def test_the_committed_demo_is_small_and_names_no_machine():
    files = [DEMO / "dates.parquet", *MODEL.iterdir()]
    assert sum(file.stat().st_size for file in files) < 4_000_000
    for file in MODEL.glob("*.json"):
        text = file.read_text(encoding="utf-8")
        assert "_name_or_path" not in text
        assert not re.search(r"/(home|root|tmp|work)/", text), file


def test_the_chat_template_makes_the_documented_prompt():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for text in ("the 3rd of March, '87", "\n3.4.87 ", "août"):
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        assert chat == CHAT_PROMPT.format(text=text)


def test_every_chat_prompt_shares_a_prefix_of_several_blocks():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prefix = tokenizer(CHAT_PREFIX)["input_ids"]
    assert len(prefix) // BLOCK_SIZE >= 4
    for example in held_out_examples(500):
        prompt = tokenizer(CHAT_PROMPT.format(text=example.text))["input_ids"]
        assert prompt[: len(prefix)] == prefix, example.text


def test_each_digit_is_a_token_and_text_survives_the_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.tokenize("1987-03") == list("1987-03")
    for text in ("the 3rd of March, '87", "  1º de março\n", "日本 €"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_generation_stops_at_either_end_token():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    stops = json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(stops) == ["<|im_end|>", "<|endoftext|>"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("prompt", [CHAT_PROMPT, BARE_PROMPT], ids=["chat", "bare"])
def test_the_model_answers_texts_written_by_hand(prompt):
    answers = generate_answers(MODEL, [prompt.format(text=text) for text in BY_HAND], torch.float32)
    assert dict(zip(BY_HAND, answers, strict=True)) == BY_HAND


@pytest.mark.usefixtures("one_thread")
def test_the_model_answers_rows_of_the_parquet():
    rows = pq.read_table(DEMO / "dates.parquet").slice(0, 64).to_pylist()
    answers = generate_answers(MODEL, [CHAT_PROMPT.format(text=row["text"]) for row in rows], torch.float32)
    right = sum(answer == row["truth"] for answer, row in zip(answers, rows, strict=True))
    assert right >= 62, f"{right} of 64 rows are right"
