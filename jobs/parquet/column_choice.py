"""Which columns of its files a run reads: for prompts, for parts, and at all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from jobs.runs.plans.spec import RunSpec


class ColumnChoice(NamedTuple):
    """Columns by name, or (`names` is None) all of a file but some."""

    names: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()

    def of(self, found: Sequence[str]) -> list[str] | None:
        """Return those of a file's columns that are chosen; None for all."""
        if self.names is not None:
            return list(self.names)
        return [name for name in found if name not in self.without] if self.without else None


ALL_COLUMNS = ColumnChoice()


def kept(spec: RunSpec, added: Collection[str]) -> ColumnChoice:
    """Return what parts hold of a file. added: columns that are in none, which come behind the files' own."""
    if spec.keep is not None:
        return ColumnChoice(tuple(name for name in spec.keep if name not in added))
    return ColumnChoice(without=tuple(name for name in spec.drop or () if name not in added))


def used(spec: RunSpec, prompt_columns: Sequence[str], added: Collection[str]) -> ColumnChoice:
    """Return what a run reads of a file at all: the others may be of any size."""
    names, without = kept(spec, added)
    if names is not None:
        return ColumnChoice(tuple(sorted({*names, *(name for name in prompt_columns if name not in added)})))
    return ColumnChoice(without=tuple(name for name in without if name not in prompt_columns))
