"""Which columns of its files a run reads: for prompts, and for parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from jobs.parquet.tables.line_problems import PROBLEM
from jobs.runs.plans.spec import RunSpec


class ColumnChoice(NamedTuple):
    """Columns by name, or (`names` is None) all of a file but some."""

    names: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()

    def of(self, found: Sequence[str]) -> list[str] | None:
        """Return those of a file's columns that are chosen; None for all."""
        if self.names is not None:
            return [*self.names, *(name for name in found if name == PROBLEM)]
        return [name for name in found if name not in self.without] if self.without else None


ALL_COLUMNS = ColumnChoice()


def kept(spec: RunSpec, added: Collection[str]) -> ColumnChoice:
    """Return what parts hold of a file. added: columns that are in none, which come behind the files' own."""
    if spec.keep is not None:
        return ColumnChoice(tuple(name for name in spec.keep if name not in added))
    return ColumnChoice(without=tuple(name for name in spec.drop or () if name not in added))
