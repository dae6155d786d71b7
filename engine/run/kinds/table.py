"""The table of all kinds of requests."""

from typing import Any

from engine.errors import InvalidSampling
from engine.run.kinds.classify import Classify
from engine.run.kinds.embed import Embed
from engine.run.kinds.generate import Generate
from engine.run.kinds.request_kind import LoadedModel, RequestKind
from engine.run.kinds.score import Score

ALL_KINDS: tuple[type[RequestKind[Any]], ...] = (Generate, Score, Embed, Classify)


class RequestKinds:
    """The kinds of requests that an engine takes."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._by_params = {kind.params: kind(loaded) for kind in ALL_KINDS}

    def kind_of(self, params: object) -> RequestKind[Any]:
        """Return the kind of request that has these parameters. Raises InvalidSampling if there is none."""
        kind = self._by_params.get(type(params))
        if kind is None:
            names = ", ".join(each.__name__ for each in self._by_params)
            raise InvalidSampling(f"params must be one of {names}, got {type(params).__name__}")
        return kind
