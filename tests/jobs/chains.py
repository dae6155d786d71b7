"""What tests of several prompts of a row share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion

GREEDY = {"temperature": 0}
TWO = [
    {"name": "short", "template": "{text} In short:"},
    {"name": "title", "template": "{text} In short: {short} A title of {id}:"},
]


def brackets(request: Request) -> FakeCompletion:
    """Answer with what was asked in brackets, which of sampled answers the seed stands in."""
    asked = request.prompt if request.messages is None else request.messages[-1]["content"]
    seed = request.sampling.get("seed", "")
    return FakeCompletion(f"<{asked}{seed}>", 0, [1, 2], "stop", len(str(asked)), 3)


def write(folder: Path, texts: list[str | None], **columns: Any) -> None:
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts, **columns}), folder / "in.parquet")
