"""Reads the forms of pages."""

import json
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs

#: The most fields of a form. A page on which all jobs are ticked has fewer.
MAX_FIELDS = 200


class Form:
    """The fields of a form, each with its values."""

    def __init__(self, values: Mapping[str, Sequence[str]] | None = None) -> None:
        self._values = values or {}

    @classmethod
    def from_body(cls, body: bytes) -> "Form":
        """Return the form in a request's body; an empty form if the body cannot be read."""
        try:
            text = body.decode("ascii")
            values = parse_qs(text, keep_blank_values=True, max_num_fields=MAX_FIELDS)
        except ValueError:
            return cls()
        return cls(values)

    def get(self, name: str, default: str = "") -> str:
        """Return the first value of a field, or the default if the form does not have the field."""
        values = self._values.get(name)
        return values[0] if values else default

    def jobs(self) -> dict[str, list[str]]:
        """Return the ids of the ticked jobs by queue. A value of the field `job` is a JSON list: [queue, job id]."""
        ids_by_queue: dict[str, list[str]] = {}
        for text in self._values.get("job", ()):
            try:
                queue, job_id = json.loads(text)
            except (ValueError, TypeError, RecursionError):
                continue
            if isinstance(queue, str) and isinstance(job_id, str):
                ids_by_queue.setdefault(queue, []).append(job_id)
        return ids_by_queue
