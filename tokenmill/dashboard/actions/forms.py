"""What a page's form holds."""

import json
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs

#: The most fields of a form: those of a page full of ticked jobs.
MAX_FIELDS = 200


class Form:
    """The fields of a form, each with its values. A field that is not there reads ""."""

    def __init__(self, values: Mapping[str, Sequence[str]] | None = None) -> None:
        self._values = values or {}

    @classmethod
    def from_body(cls, body: bytes) -> "Form":
        """Read a form as browsers send it. One that cannot be read is empty."""
        try:
            return cls(
                parse_qs(body.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
            )
        except ValueError:
            return cls()

    def get(self, name: str, default: str = "") -> str:
        """Return the first value of a field."""
        values = self._values.get(name)
        return values[0] if values else default

    def jobs(self) -> dict[str, list[str]]:
        """Return the ids of the ticked jobs by queue: each value of `job` is a queue and an id as a JSON list."""
        ids_of: dict[str, list[str]] = {}
        for text in self._values.get("job", ()):
            try:
                queue, job_id = json.loads(text)
            except (ValueError, TypeError, RecursionError):
                continue
            if isinstance(queue, str) and isinstance(job_id, str):
                ids_of.setdefault(queue, []).append(job_id)
        return ids_of
