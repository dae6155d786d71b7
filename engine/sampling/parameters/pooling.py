"""PoolingParams: the kind of request that asks for a text's embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine.errors import InvalidSampling
from engine.sampling.parameters.ranges import MAX_COUNT, Range, brief, check_switch
from engine.sampling.parameters.sampling import RANGES

DIMENSIONS = Range(1, MAX_COUNT, integer=True)


@dataclass(frozen=True)
class PoolingParams:
    """What to make of the vector that a text is pooled to. Raises InvalidSampling for a value that cannot be.

    dimensions: the first so many of its numbers alone (for a model that was trained so, Matryoshka); None is
        all of them.
    normalize: to length 1, after the cut. None does so where the checkpoint's own embeddings have that
        length, and where dimensions are given.
    prompt_name: which of the checkpoint's prompts stands before the text, such as "query"; None is its
        default one, if it has one. Not for prompts of token ids, before which none ever stands.
    truncate_prompt_tokens: as of SamplingParams.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            DIMENSIONS.check("dimensions", self.dimensions)
        if self.normalize is not None:
            check_switch("normalize", self.normalize)
        if self.prompt_name is not None and not isinstance(self.prompt_name, str):
            raise InvalidSampling("prompt_name must be a text", brief(self.prompt_name))

        if self.truncate_prompt_tokens is not None:
            RANGES["truncate_prompt_tokens"].check("truncate_prompt_tokens", self.truncate_prompt_tokens)
            if self.truncate_prompt_tokens == 0:
                raise InvalidSampling(
                    "truncate_prompt_tokens=0 leaves nothing of the prompt; -1 is what fits"
                )

    @property
    def n(self) -> int:
        """Completions that such a request gives."""
        return 1

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> PoolingParams:
        """Build from names and values that came from outside. Raises InvalidSampling for an unknown name."""
        names = [field.name for field in fields(cls)]
        for name in mapping:
            if name not in names:
                raise InvalidSampling(f"{brief(name)} says nothing of embeddings; use {', '.join(names)}")
        return cls(**mapping)
