"""Sampling values that each row brings in columns of its own."""

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pyarrow as pa

from jobs.errors import InvalidJob, WrongColumnType
from jobs.parquet.tables.columns import RowProblem, is_list, is_text
from jobs.prompts.arguments import NOT_TEXT

#: Sets of values whose check is remembered: rows of few kinds are common.
CHECKS_REMEMBERED = 1024


class RowSampling:
    """Sampling values from columns `by_name`; null leaves the run's. check: raises InvalidJob for impossible ones."""

    def __init__(
        self, by_name: Mapping[str, str], sampling: Mapping[str, Any], check: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self.columns = tuple(by_name.values())
        self._by_name, self._sampling, self._check_sampling = dict(by_name), dict(sampling), check
        # What null stands for is written out, so that equal values are equal texts; a run's seed is no row's.
        self._shared = {name: value for name, value in sampling.items() if name != "seed"}
        self._problem = lru_cache(CHECKS_REMEMBERED)(self._find_problem)

    def check(self, schema: pa.Schema) -> None:
        for name, column in self._by_name.items():
            _check_type(name, column, schema.field(column).type)

    def of(self, values: Mapping[str, Any]) -> str:
        found = {
            name: self._shared.get(name) if values[column] is None else values[column]
            for name, column in self._by_name.items()
        }
        own = json.dumps({name: _plain(value) for name, value in found.items() if value is not None})
        if (problem := self._problem(own)) is not None:
            raise RowProblem(problem)
        return own

    def _find_problem(self, own: str) -> str | None:
        values = json.loads(own)
        for name, value in values.items():
            try:
                self._check_sampling({name: value})
            except InvalidJob as error:
                return f"column {self._by_name[name]!r}: {error}"
        try:
            self._check_sampling({**self._sampling, **values})
        except InvalidJob as error:
            return str(error)
        return None


def _check_type(name: str, column: str, kind: pa.DataType) -> None:
    inner = kind.value_type if is_list(kind) else kind
    number = pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_decimal(inner)
    if pa.types.is_null(inner) or number or pa.types.is_boolean(inner):
        return
    if is_text(inner) and name not in NOT_TEXT:
        return
    raise WrongColumnType(column, kind, f"a value for {name}: a number, as a rule")


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: pandas makes integers beside a null floating point numbers."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Decimal) and value.is_finite():
        return int(value) if value == value.to_integral_value() else float(value)
    return value
