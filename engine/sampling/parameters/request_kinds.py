"""The kinds of requests, by name, for callers that carry values and no classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidRequest
from engine.sampling.parameters.pooling import PoolingParams
from engine.sampling.parameters.sampling import SamplingParams
from engine.sampling.parameters.scoring import ScoringParams

RequestParams = SamplingParams | ScoringParams | PoolingParams
KINDS: Mapping[str, type[SamplingParams] | type[ScoringParams] | type[PoolingParams]] = {
    "generate": SamplingParams,
    "score": ScoringParams,
    "embed": PoolingParams,
}


def request_params(kind: str, values: Mapping[str, Any]) -> RequestParams:
    """What `Engine.add` takes for a request of a kind. Raises InvalidRequest or a subclass."""
    if kind not in KINDS:
        raise InvalidRequest(f"no request is of the kind {kind!r}; there are {', '.join(KINDS)}")
    return KINDS[kind].from_mapping(values)
