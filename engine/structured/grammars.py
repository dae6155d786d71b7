"""Grammars: from what a request asks of its text to a compiled grammar, by llguidance.

A grammar compiles in about a millisecond and its masks are computed as they are needed, so that nothing is
done ahead for a vocabulary. What it cannot enforce exactly it refuses, and a completion never holds what
its schema forbids. Source: https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import InvalidSampling
from engine.sampling.params import SamplingParams
from engine.sampling.request_edits import allowed_mask
from engine.sampling.structured_outputs import NAME, StructuredOutputsParams
from engine.structured.masks import MAX_MASK_S, fill_masks
from engine.structured.matcher import SMALL_VOCABULARY, Matcher, Vocabulary
from engine.structured.regex_dialect import portable

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_GRAMMARS = 64  # that are kept
MAX_REASON_CHARS = 300

#: One blank, or a line break and what it is indented by: no more between two parts of a JSON text.
JSON_OPTIONS = {"whitespace_pattern": r" |\n {0,32}"}

#: So that none takes more than about a second, or 40 MB: the defaults allow 3 s and 500 MB.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 20_000,
}


_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")


class Grammars:
    """The grammars of a model's tokenizer. For any number of threads; each grammar compiles once.

    Importing it needs no llguidance; the first grammar does.
    """

    def __init__(self, backend: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """backend: the model's `tokenizers.Tokenizer`, None if it has none. vocab_size: of the logits.

        eos_token_ids: those that end a text, and are no part of it.
        """
        self._backend, self._vocab_size = backend, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = Lock()
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: Any = None
        self._compiled: OrderedDict[StructuredOutputsParams, LLMatcher | InvalidSampling] = OrderedDict()

    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar, if there is one, so that `matchers` will find it. Raises InvalidSampling."""
        if isinstance(params.structured_outputs, StructuredOutputsParams):
            self._find(params.structured_outputs)

    def matchers(self, params: SamplingParams, end_token_ids: frozenset[int]) -> Sequence[Matcher | None]:
        """What follows each completion of a request, None where it may be any text.

        end_token_ids: every id that ends the completion. Raises InvalidSampling where a grammar cannot be
        compiled.
        """
        spec = params.structured_outputs
        if not isinstance(spec, StructuredOutputsParams):
            return [None] * params.n
        compiled, allowed = self._find(spec), allowed_mask(params, self._vocab_size)
        assert self._vocabulary is not None
        shared = (compiled, self._vocabulary, end_token_ids, allowed)
        return [Matcher(compiled.deep_copy(), *shared) for _ in range(params.n)]

    def _find(self, spec: StructuredOutputsParams) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(spec)
            if found is None:
                self._start()
                try:
                    found = self._compile(spec)
                except InvalidSampling as error:
                    found = error
                self._compiled[spec] = found
                if len(self._compiled) > MAX_GRAMMARS:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(spec)
        if isinstance(found, InvalidSampling):
            raise InvalidSampling(*found.args)
        return found

    def _start(self) -> None:
        """Read the vocabulary, which takes up to a second. Raises InvalidSampling if that cannot be."""
        if self._vocabulary is not None:
            return
        if find_spec("llguidance") is None:
            raise InvalidSampling(
                f"{NAME} needs llguidance: pip install 'tokenmill[structured]' on the worker"
            )
        if self._backend is None:
            raise InvalidSampling(
                f"{NAME} needs a tokenizer of the tokenizers package, which this model has not"
            )
        from llguidance import LLTokenizer

        known = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        ends = self._eos_token_ids or None
        try:
            num_tokens = max(known, self._vocab_size)
            tokenizer = LLTokenizer(
                self._backend.to_str(),
                n_vocab=num_tokens,
                eos_token=ends,
                # sets of tokens that are allowed as one: to try them costs more than a small vocabulary does
                slices=[] if num_tokens < SMALL_VOCABULARY else None,
            )
        except Exception as error:  # whatever it makes of a vocabulary
            raise InvalidSampling(
                f"{NAME} cannot be served with this model's tokenizer", _short(error)
            ) from error
        self._tokenizer, self._vocabulary = tokenizer, Vocabulary.of(tokenizer)

    def _compile(self, spec: StructuredOutputsParams) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _grammar_of(spec)
        except InvalidSampling:
            raise
        except Exception as error:  # whatever its readers make of a text
            raise _refused(spec, error) from error
        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if compiled.is_error():
            raise _refused(spec, compiled.get_error())
        self._try_out(spec, compiled)
        return compiled

    def _try_out(self, spec: StructuredOutputsParams, compiled: LLMatcher) -> None:
        """Raise InvalidSampling if there is no first token, or it takes too long to find."""
        assert self._vocabulary is not None
        first = Matcher(compiled.deep_copy(), compiled, self._vocabulary, frozenset(), None)
        mask = np.zeros((1, self._vocabulary.num_words), np.int32)
        start = time.monotonic()
        fill_masks([first], mask)
        if first.error is not None:
            raise _refused(spec, first.error)
        if not mask.any() and not first.may_end:
            raise _refused(spec, "no text satisfies it")
        if time.monotonic() - start > MAX_MASK_S:
            raise _refused(spec, "its first token takes too long to find")


def _grammar_of(spec: StructuredOutputsParams) -> str:
    """The grammar as llguidance reads it. Raises whatever its readers raise."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if spec.json is not None or spec.json_object:
        schema = json.loads(str(spec.json)) if spec.json is not None else {"type": "object"}
        if schema is False:
            raise _refused(spec, "no text satisfies it")
        text = json.dumps({} if schema is True else schema, ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(portable(spec.regex))
    if spec.choice is not None:
        # one pattern, whose states are found as they are needed, takes thousands of texts
        return LLMatcher.grammar_from_regex("|".join(_META.sub(r"\\\g<0>", text) for text in spec.choice))
    assert spec.grammar is not None
    return LLMatcher.grammar_from_lark(any_to_lark(spec.grammar))


def _refused(spec: StructuredOutputsParams, reason: object) -> InvalidSampling:
    problem = f"{NAME}.{spec.kind} must be one that can be enforced"
    return InvalidSampling(problem, f"one of which llguidance says: {_short(reason)}")


def _short(reason: object) -> str:
    return " ".join(str(reason).replace("<non-verbose/>", "").split())[:MAX_REASON_CHARS]
