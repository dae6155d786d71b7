"""What a child does that renders the rows of a run."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from jobs.parquet.tables.row_values import RowProblem, python_rows
from jobs.prompts.jinja_environment import render
from jobs.prompts.template_texts import TemplateProblem
from sandbox.child import Worker

_TOGETHER_CHARS = 1 << 20


def render_rows(worker: Worker) -> Iterator[dict[str, Any]]:
    """Render a batch in Arrow's stream format; reply rows' `texts`, or why there is none. defaults: stand for null."""
    question = worker.question
    (batch,) = pa.ipc.open_stream(pa.py_buffer(worker.body))
    found: list[list[str] | str] = []
    chars = 0
    for values in python_rows(question["columns"], batch):
        outcome = _outcome(question, values)
        found.append(outcome)
        chars += sum(map(len, outcome))
        if chars > _TOGETHER_CHARS:
            yield {"rows": found}
            found, chars = [], 0
    yield {"rows": found}


def _outcome(question: dict[str, Any], values: dict[str, Any] | RowProblem) -> list[str] | str:
    if isinstance(values, RowProblem):
        return str(values)
    defaults = question["defaults"]
    known = {name: defaults.get(name) if value is None else value for name, value in values.items()}
    try:
        return render(question["texts"], known)
    except TemplateProblem as problem:
        return f"the template: {problem}"
