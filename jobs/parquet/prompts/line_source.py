"""Lines of OpenAI's batch files, with the files of their pictures in them."""

import json
from base64 import b64encode
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
        paths: list[dict[str, Any]] = []

        def note(part: dict[str, Any]) -> dict[str, Any]:
            found = part.get("image_url")
            shown = part["image_url"] = {"url": found} if isinstance(found, str) else found
            if isinstance(shown, dict) and isinstance(url := shown.get("url"), str) and url[:5].lower() != "data:":
                paths.append(shown)
            return part

        text = prompt[0]["line"]
        try:
            line = json.loads(text, object_hook=lambda each: note(each) if each.get("type") == "image_url" else each)
        except (ValueError, RecursionError):
            return Row(text)  # what is wrong with it is told once it is asked
        for shown, file in zip(paths, loaded([each["url"] for each in paths], read), strict=True):
            shown["url"] = f"data:image/file;base64,{b64encode(file).decode()}"
        return Row(json.dumps(line) if paths else text)


def _line(text: Any) -> str | Parts:
    if text is None:
        raise RowProblem("there is no request")
    return [{"line": text}] if "image_url" in text else str(text)
