"""Log probabilities as the values of columns."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pyarrow as pa


@cache
def logprobs_type(number: str, of_each: bool = False) -> pa.DataType:
    """Return the type of a text's: for each token a list of itself, then of the likeliest ones.

    number: the type of floats. of_each: of the list of a row's completions.
    """
    names = {"token_id": "int32", "token": "string", "logprob": number, "rank": "int32"}
    kind = pa.list_(pa.list_(pa.struct([(name, pa.type_for_alias(each)) for name, each in names.items()])))
    return pa.list_(kind) if of_each else kind


def logprobs_value(found: Any, number: str, of_each: bool) -> pa.Array:
    """Return an array that holds what the engine gave, as one value: of Python's it would take a tenfold."""
    return pa.array([_entries(found)], logprobs_type("float32", of_each)).cast(logprobs_type(number, of_each))


def _entries(found: Any) -> Any:
    if isinstance(found, Mapping):
        return [(token_id, each.decoded_token, each.logprob, each.rank) for token_id, each in found.items()]
    return None if found is None else [_entries(each) for each in found]
