"""Trials: tries each form that is new in a process apart, before this one compiles it.

A form is the producer's, and llguidance follows it on the thread's stack: one of 100 KB can overrun any. In
the engine's process that would be the end of all that it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidSampling
from engine.sampling.parameters.structured_outputs import NAME, NAMES, StructuredOutputsParams
from engine.structured.compiler import unusable
from sandbox import Child, ChildFailed, Limits, Pool

#: Seconds that a form may take.
LIMIT_S = 5.0

#: The same of reading the vocabulary.
BEGIN_LIMIT_S = 60.0

#: Of a process, beside the vocabulary. Grammars take some 40 MB.
MEMORY_BYTES = 256 << 20

_VOCABULARY = "engine.structured.trial_child:read_vocabulary"
_FORM = "engine.structured.trial_child:try_form"


class NotTried(InvalidSampling):
    """Raised when there is no process in which a form could be tried: no fault of the form's."""


class Trials:
    """As many processes as threads that ask at once. vocabulary: the arguments of their Compiler."""

    def __init__(self, vocabulary: Mapping[str, Any]) -> None:
        self._vocabulary = vocabulary
        self._pool = Pool(self._begin)

    def grammar_of(self, spec: StructuredOutputsParams) -> str:
        """The grammar of a form that has survived being compiled. Raises InvalidSampling, or NotTried."""
        form = {name: value for name in NAMES if (value := getattr(spec, name)) is not None}
        try:
            limits = Limits(LIMIT_S, MEMORY_BYTES)
            reply, _ = self._pool.call(lambda child: child.ask(_FORM, form, limits))
        except ChildFailed as error:
            raise unusable(spec, f"whose compilation {error}") from None
        except OSError as error:
            raise _not_tried(error) from None
        if "refused" in reply:
            raise InvalidSampling(*reply["refused"])
        return str(reply["grammar"])

    def _begin(self, child: Child) -> None:
        try:
            child.ask(_VOCABULARY, self._vocabulary, Limits(BEGIN_LIMIT_S))
        except ChildFailed as error:
            raise _not_tried(error) from None

    def close(self) -> None:
        """End the processes; a thread that waits for one learns of it."""
        self._pool.close(kill=True)


def _not_tried(error: Exception) -> NotTried:
    return NotTried(f"{NAME} cannot be compiled here: no process for it begins", str(error))
