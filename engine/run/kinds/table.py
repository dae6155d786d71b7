"""The table of all kinds of requests."""

from typing import Any, NoReturn

from engine.errors import InvalidSampling
from engine.run.kinds.classify import Classify
from engine.run.kinds.embed import Embed
from engine.run.kinds.generate import Generate
from engine.run.kinds.request_kind import LoadedModel, RequestKind
from engine.run.kinds.score import Score

ALL_KINDS: tuple[type[RequestKind[Any]], ...] = (Generate, Score, Embed, Classify)


class RequestKinds(dict[type[Any], RequestKind[Any]]):
    """The kinds of requests that an engine takes, by the class of their parameters.

    Raises InvalidSampling for the class of anything else.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__({kind.params: kind(loaded) for kind in ALL_KINDS})

    def __missing__(self, params_class: type[Any]) -> NoReturn:
        names = ", ".join(kind.__name__ for kind in self)
        raise InvalidSampling(f"params must be one of {names}, got {params_class.__name__}")
