"""Messy dates with their true ISO 8601 answers, from a seed.

The rules that make a text unambiguous, the first of which the model's system prompt repeats:

- A date needs a day, a month and a year; a text that lacks one of them has the answer "no date".
- A year of two digits means 2000 to 2049 for 00 to 49 and 1950 to 1999 for 50 to 99.
- Digits between slashes are month/day/year, as in the United States: 3/4/87 is 4 March. Where the first
  number is above 12 it can only be the day: 25/12/87 is 25 December.
- Digits between dots, or between dashes with the year last, are day, month, year: 3.4.87 is 3 April.
- Four digits first mean year, month, day, whatever the separator, and so do eight digits in a row.
- A day that its month never has (31 June, 30 February) is no date. Leap years are not checked.
- A weekday is noise: it need not be the one of that day. So are letter case, accents, extra or missing
  spaces, and one wrong letter in a long month name.
"""

import datetime
import random
import unicodedata
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ops.demo.words import ENGLISH_ORDINAL_WORDS, LANGUAGES, NO_DATE, Language

NO_DATE_ANSWER = "no date"
PIVOT_YEAR = 50  # 00..49 -> 20xx, 50..99 -> 19xx
NO_DATE_SHARE = 0.15
IMPOSSIBLE_SHARE = 0.03
DIGITS_SHARE = 0.3  # of the texts with a day, possible or not
HELD_OUT_SEED = 2025
TRAINING_SEED = 7
SHORTEST_MISSPELT = 6  # letters; shorter names are one letter away from each other (juni, juli)
DIGIT_STYLES = (
    "ymd",
    "ymd",
    "slash",
    "slash",
    "slash",
    "dmy-dot",
    "dmy-dot",
    "dmy-dash",
    "compact",
    "stamp",
)


@dataclass(frozen=True)
class Example:
    """One text, its answer (`YYYY-MM-DD` or "no date") and the way the date is written in it."""

    text: str
    truth: str
    style: str


@dataclass(frozen=True)
class Day:
    """A day as people write it, which the calendar need not have."""

    year: int
    month: int
    day: int

    @property
    def has_short_year(self) -> bool:
        """Whether two digits name the year under the pivot rule."""
        return 1900 + PIVOT_YEAR <= self.year < 2000 + PIVOT_YEAR

    def __str__(self) -> str:
        return f"{self.year:04d}-{self.month:02d}-{self.day:02d}"


def held_out_examples(count: int, seed: int = HELD_OUT_SEED) -> list[Example]:
    """Draw `count` examples, no text twice by `text_key`; training leaves these texts out."""
    rng, examples = random.Random(seed), dict[str, Example]()
    while len(examples) < count:
        example = make_example(rng)
        examples.setdefault(text_key(example.text), example)
    return list(examples.values())


def training_examples(
    held_out: Collection[Example], seed: int = TRAINING_SEED
) -> Iterator[Example]:
    """Yield examples without end, none with the text of a held-out one, compared by `text_key`."""
    rng, banned = random.Random(seed), {text_key(example.text) for example in held_out}
    while True:
        example = make_example(rng)
        if text_key(example.text) not in banned:
            yield example


def text_key(text: str) -> str:
    """The text without case and extra spaces: texts that differ in no more than that count as the same."""
    return " ".join(text.casefold().split())


def make_example(rng: random.Random) -> Example:
    """Draw one example: a date in words or digits, an impossible one or none, with surroundings and noise."""
    language_name = rng.choice(list(LANGUAGES)) if rng.random() < 0.7 else "en"
    language = LANGUAGES[language_name]
    kind = rng.random()
    if kind < NO_DATE_SHARE:
        core, truth, style = write_no_date(rng, language), NO_DATE_ANSWER, "none"
    else:
        possible = kind >= NO_DATE_SHARE + IMPOSSIBLE_SHARE
        day = random_day(rng) if possible else impossible_day(rng)
        if rng.random() < DIGITS_SHARE:
            style, core = write_digits(rng, day)
        else:
            style, core = f"words-{language_name}", write_words(rng, day, language_name)
        truth, style = (str(day), style) if possible else (NO_DATE_ANSWER, "impossible")
        core = add_weekday(rng, core, language)
    return Example(add_noise(rng, surround(rng, core, language)), truth, style)


def random_day(rng: random.Random) -> Day:
    """Draw a day of 1900 to 2099, four in five from 1950 to 2049, where two digits name the year."""
    first, last = (1950, 2049) if rng.random() < 0.8 else (1900, 2099)
    start, end = datetime.date(first, 1, 1).toordinal(), datetime.date(last, 12, 31).toordinal()
    date = datetime.date.fromordinal(rng.randint(start, end))
    return Day(date.year, date.month, date.day)


def impossible_day(rng: random.Random) -> Day:
    """Draw a day that its month has in no year: 30 or 31 February, 31 of a short month, 32 to 99 of any."""
    year = random_day(rng).year
    kind = rng.random()
    if kind < 0.35:
        return Day(year, 2, rng.randint(30, 31))
    if kind < 0.7:
        return Day(year, rng.choice((4, 6, 9, 11)), 31)
    return Day(year, rng.randint(1, 12), rng.choice((rng.randint(32, 39), rng.randint(32, 99))))


def write_year(rng: random.Random, day: Day, with_apostrophe: bool = True) -> str:
    """Write the year as 1987, or as '87 or 87 where the pivot rule allows it."""
    if not day.has_short_year or rng.random() < 0.6:
        return str(day.year)
    apostrophe = rng.choice(("'", "'", "’", "", "")) if with_apostrophe else ""
    return f"{apostrophe}{day.year % 100:02d}"


def write_digits(rng: random.Random, day: Day) -> tuple[str, str]:
    """Write the day in digits; the first item names the order and separator."""
    width = rng.choice((1, 2))
    d, m, y = (
        f"{day.day:0{width}d}",
        f"{day.month:0{width}d}",
        write_year(rng, day, with_apostrophe=False),
    )
    style = rng.choice(DIGIT_STYLES)
    if style == "ymd":
        separator = rng.choice("--/.")
        return style, f"{day.year}{separator}{m}{separator}{d}"
    if style == "slash":
        day_first = day.day > 12 and rng.random() < 0.4
        return ("dmy-slash", f"{d}/{m}/{y}") if day_first else ("mdy-slash", f"{m}/{d}/{y}")
    if style == "dmy-dot":
        separator = rng.choice((".", ".", ". "))
        return style, f"{d}{separator}{m}{separator}{y}"
    if style == "dmy-dash":
        return style, f"{d}-{m}-{y}"
    if style == "compact":
        return style, str(day).replace("-", "")
    return (
        style,
        f"{day}{rng.choice('T ')}{clock_time(rng)}:{rng.randrange(60):02d}{rng.choice(('Z', ''))}",
    )


def write_words(rng: random.Random, day: Day, language_name: str) -> str:
    """Write the day with the month's name, in full or short, in the language's own order."""
    language = LANGUAGES[language_name]
    names = language.months[day.month - 1]
    month = names[0] if rng.random() < 0.55 else rng.choice(names)
    if month != names[0] and rng.random() < 0.4:
        month += "."
    elif len(month) >= SHORTEST_MISSPELT and rng.random() < 0.05:
        month = misspell(rng, month)
    number = f"{day.day:02d}" if rng.random() < 0.15 else str(day.day)
    return rng.choice(language.patterns).format(
        d=number, o=ordinal(rng, day.day, language_name), m=month, y=write_year(rng, day)
    )


def misspell(rng: random.Random, word: str) -> str:
    """Drop, double or swap one letter, never the first."""
    at = rng.randint(1, len(word) - 2)
    start, letter, following, rest = word[:at], word[at], word[at + 1], word[at + 2 :]
    letters = rng.choice((following, letter + letter + following, following + letter))
    return start + letters + rest


def ordinal(rng: random.Random, day: int, language_name: str) -> str:
    """Write the day as the language's ordinal where it has one for dates, else as the number."""
    if language_name == "en":
        if day <= len(ENGLISH_ORDINAL_WORDS) and rng.random() < 0.15:
            return ENGLISH_ORDINAL_WORDS[day - 1]
        suffix = "th" if 10 < day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
        return f"{day}{suffix}"
    if language_name == "nl":
        return f"{day}e"
    first = {"fr": "1er", "es": "1º", "it": "1°", "pt": "1º"}.get(language_name)
    return first if day == 1 and first else str(day)


def add_weekday(rng: random.Random, core: str, language: Language) -> str:
    """Put a weekday before or after the date in one text of five; it need not be the right one."""
    if rng.random() >= 0.2:
        return core
    weekday = rng.choice(language.weekdays)
    return rng.choice(
        ("{w}, {c}", "{w} {c}", "{w}, {c}", "{c} ({w})", "{w}. {c}", "{c}, {w}")
    ).format(w=weekday, c=core)


def surround(rng: random.Random, core: str, language: Language) -> str:
    """Put the words of a letter or an invoice before the text, after it, on both sides or on none."""
    before = rng.choice(language.before) + " " if rng.random() < 0.4 else ""
    after = rng.choice((" ", ", ", " ")) + rng.choice(language.after) if rng.random() < 0.2 else ""
    if rng.random() < 0.05:
        # A mark keeps a filler's last number ("alle 10") apart from a date's first month.
        before, after = (
            filler(rng) + rng.choice((". ", "; ")) + before,
            after + rng.choice((". ", "; ", " ")) + filler(rng),
        )
    numbers = {"n": digits(rng, 3, 5)}
    return before.format(**numbers) + core + after.format(**numbers)


def filler(rng: random.Random) -> str:
    """Draw one to three phrases of any language, which make a text longer and name no day."""
    languages = rng.choices(list(LANGUAGES.values()), k=rng.randint(1, 3))
    return " ".join(rng.choice(language.before + language.after) for language in languages)


def write_no_date(rng: random.Random, language: Language) -> str:
    """Write a text that names no full date: see `words.NO_DATE`, or nothing but the words around dates."""
    if rng.random() < 0.06:
        return filler(rng).replace("{n}", digits(rng, 3, 5))
    day = rng.randint(1, 31)
    text = rng.choice(NO_DATE)
    while "{n}" in text:
        text = text.replace("{n}", digits(rng, 1, 5), 1)
    return text.format(
        p=f"{digits(rng, 1, 4)}{rng.choice('.,')}{rng.randrange(100):02d}",
        t=clock_time(rng),
        a="".join(rng.choices("ABCDEFGHKLMNPRSTVWXZ", k=2)),
        d=day,
        o=ordinal(rng, day, "en"),
        m=rng.choice(rng.choice(language.months)),
        w=rng.choice(language.weekdays),
        y=rng.randint(1900, 2099),
    )


def digits(rng: random.Random, fewest: int, most: int) -> str:
    """Draw a number of `fewest` to `most` digits, the first of them not 0."""
    length = rng.randint(fewest, most)
    return str(rng.randint(10 ** (length - 1), 10**length - 1))


def clock_time(rng: random.Random) -> str:
    """Draw a time of day, as 09:05."""
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"


def add_noise(rng: random.Random, text: str) -> str:
    """Change case, drop accents, commas or a space, and double spaces, each in some of the texts."""
    case = rng.random()
    if case < 0.12:
        text = text.lower()
    elif case < 0.2:
        text = text.upper()
    if rng.random() < 0.12:
        text = "".join(
            char for char in unicodedata.normalize("NFD", text) if not unicodedata.combining(char)
        )
    if rng.random() < 0.1:
        text = text.replace(",", "")
    if rng.random() < 0.03:
        text = drop_space(rng, text)
    if rng.random() < 0.12:
        text = "  ".join(text.split(" ", rng.randint(1, 3)))
    if rng.random() < 0.04:
        text = rng.choice((" ", "\n")) + text + " "
    return text


def drop_space(rng: random.Random, text: str) -> str:
    """Leave out one space, where that joins no two numbers."""
    spaces = [
        at for at in range(1, len(text) - 1)
        if text[at] == " " and not (text[at - 1].isdigit() and text[at + 1].isdigit())
    ]  # fmt: skip
    if not spaces:
        return text
    at = rng.choice(spaces)
    return text[:at] + text[at + 1 :]
