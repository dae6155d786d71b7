"""How seven languages write months, weekdays, days and what stands around a date: `words.toml`."""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Language:
    """What one language needs to write a date. months: twelve tuples of spellings, the full name first."""

    months: tuple[tuple[str, ...], ...]
    weekdays: tuple[str, ...]
    patterns: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]


def phrases(table: str) -> tuple[str, ...]:
    """Split 'invoice dated | due on' at the bars."""
    return tuple(phrase.strip() for phrase in table.split("|"))


def language(tables: dict[str, str]) -> Language:
    """Make a language of its tables; a month's spellings stand between blanks."""
    found = {name: phrases(table) for name, table in tables.items()}
    return Language(months=tuple(tuple(month.split()) for month in found.pop("months")), **found)


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
LANGUAGES = {name: language(tables) for name, tables in _TABLES["languages"].items()}
ENGLISH_ORDINAL_WORDS = phrases(_TABLES["english_ordinals"])
NO_DATE = phrases(_TABLES["no_date"])
