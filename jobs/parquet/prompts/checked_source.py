"""Prompts with the rows behind them that a function checks their answers with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from jobs.common.json_text import to_json
from jobs.errors import WrongColumnType
from jobs.parquet.prompts.prompt_source import TEXT_FORMS, PromptSource, render_behind
from jobs.parquet.tables.nested_values import holds_bytes
from jobs.parquet.tables.row_values import RowProblem


class CheckedSource(PromptSource):
    """Another source's prompts with the rows' values behind them, so that a text still identifies what is
    asked. `row_sampling.split` takes them apart.

    columns: what the function gets beside the columns that the prompt is made of.
    """

    def __init__(self, source: PromptSource, columns: Sequence[str]) -> None:
        self.columns = tuple(dict.fromkeys((*source.columns, *columns)))
        self.is_chat = source.is_chat
        self._source = source

    def check(self, schema: pa.Schema) -> None:
        self._source.check(schema)
        for column in self.columns:
            if holds_bytes(schema.field(column).type):
                raise WrongColumnType(column, schema.field(column).type, TEXT_FORMS)

    def rendered(self, rows: pa.RecordBatch) -> Iterator[str | RowProblem]:
        return render_behind(self._source, self.columns, rows, to_json)
