"""Lines of OpenAI's batch files, with the files of their pictures in them."""

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

from jobs.parquet.prompts.prompt_source import ColumnSource, Row
from jobs.parquet.tables.columns import is_text
from jobs.parquet.tables.row_values import RowProblem
from jobs.prompts.pictures import ReadFile, loaded
from jobs.tasks import Parts


class LineSource(ColumnSource):
    """Each line is its own JSON, which may be longer than a prompt; a picture's path in it becomes a data: URL."""

    def __init__(self) -> None:
        super().__init__("request", _line, is_text, "JSON")

    def pictured(self, prompt: Parts, read: ReadFile) -> Row:
        line = prompt[0]
        paths = [url for url in _urls(line) if isinstance(url["url"], str) and url["url"][:5].lower() != "data:"]
        for url, file in zip(paths, loaded([each["url"] for each in paths], read), strict=True):
            url["url"] = f"data:image/file;base64,{b64encode(file).decode()}"
        return Row(json.dumps(line))


def _line(text: Any) -> str | Parts:
    if text is None:
        raise RowProblem("there is no request")
    if "image_url" in text:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # which is told when it is asked
            return str(text)
        if isinstance(line, dict):
            return [line]
    return str(text)


def _urls(value: Any) -> Iterator[dict[str, Any]]:
    """Yield what an image_url is, wherever it stands; a text becomes an object."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict) and each.get("type") == "image_url":
            if isinstance(each.get("image_url"), str):
                each["image_url"] = {"url": each["image_url"]}
            if isinstance(each.get("image_url"), dict) and "url" in each["image_url"]:
                yield each["image_url"]
        elif isinstance(each, dict | list):
            left += each.values() if isinstance(each, dict) else each
