"""Values as JSON in a prompt."""

from __future__ import annotations

import datetime
import json
import math
from decimal import Decimal
from typing import Any


def to_json(value: Any, indent: int | None = None) -> str:
    """Return a list or dict as JSON, in the characters that it has; indent: as of json.dumps.

    Numbers that JSON has not (not a number, infinities) are null. Times are ISO 8601. A decimal is a number
    where a floating point number is exactly it as it is written, else a text.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_written, indent=indent)
    except ValueError:
        return json.dumps(
            _finite(value), ensure_ascii=False, allow_nan=False, default=_written, indent=indent
        )


def _written(value: Any) -> Any:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        number = float(value)
        return number if math.isfinite(number) and Decimal(repr(number)) == value else str(value)
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return value
