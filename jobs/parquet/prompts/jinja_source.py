"""Prompts from Jinja templates over a row's columns."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from jobs.context.children import CHILDREN
from jobs.errors import InvalidJob
from jobs.parquet.prompts.prompt_source import PromptSource, check_defaults, checked_chat, checked_text
from jobs.parquet.tables.row_values import RowProblem
from jobs.prompts.template_texts import LIMIT_S, JinjaTexts, template_texts
from sandbox import ChildFailed, Limits

_TASK = "jobs.parquet.prompts.jinja_rows:render_rows"


class JinjaSource(PromptSource):
    """A Jinja template over columns, of a text or a chat. Null is `none`, or one of `defaults`."""

    def __init__(
        self, template: Any, defaults: Mapping[str, str] = MappingProxyType({}), *, needs_column: bool = True
    ) -> None:
        texts, self._roles = template_texts(template)
        self._template, self._defaults = JinjaTexts(texts), dict(defaults)
        self.columns = tuple(sorted(self._template.names))
        if needs_column and not self.columns:
            raise InvalidJob(
                "the template names no column, so that every row would ask the same: "
                "write {{ column }} where a row's value goes"
            )
        check_defaults(defaults, self.columns)

    def read(self, rows: pa.RecordBatch) -> Iterator[list[str] | RowProblem]:
        """Yield rows' texts; a child that fails is asked again, row by row: what it fails with then is the row's."""
        done, singly = 0, False
        while done < rows.num_rows:
            try:
                for found in self._asked(rows.slice(done, 1 if singly else None)):
                    done += 1
                    yield RowProblem(found) if isinstance(found, str) else found
            except ChildFailed as error:
                if singly:
                    done += 1
                    yield RowProblem(f"the template {error}")
                singly = True

    def _asked(self, rows: pa.RecordBatch) -> Iterator[list[str] | str]:
        rows, sink = rows.select(self.columns), pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_batch(rows)
        question = {"texts": self._template.texts, "columns": self.columns, "defaults": self._defaults}
        with CHILDREN.lent() as child:
            for message, _ in child.replies(_TASK, question, Limits(LIMIT_S), sink.getvalue().to_pybytes()):
                yield from message["rows"]

    def render(self, values: list[str]) -> str:
        if self._roles is None:
            return checked_text(values[0])
        pairs = zip(self._roles, values, strict=True)
        return checked_chat([{"role": role, "content": text} for role, text in pairs])
