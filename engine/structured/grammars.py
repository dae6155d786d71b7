"""Grammars: what requests ask of their texts, compiled, each form once for all that ask it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from engine.errors import InvalidSampling
from engine.sampling.parameters.sampling import SamplingParams
from engine.sampling.parameters.structured_outputs import NAME, StructuredOutputsParams
from engine.sampling.request_edits import allowed_mask
from engine.structured.compiler import STACK_BYTES, Compiler, stacks_of
from engine.structured.matcher import Matcher
from engine.structured.trials import NotTried, Trials

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_GRAMMARS = 64  # that are kept beside those that somebody holds
NUM_THREADS = 2  # a form that takes long leaves one for those of others


class Grammars:
    """The grammars of a model's tokenizer. For any number of threads.

    A form that is new is tried in a process apart, and compiled here once it has survived that.
    Importing this needs no llguidance; the first grammar does.
    """

    def __init__(self, backend: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """backend: the model's `tokenizers.Tokenizer`, None if it has none. vocab_size: of the logits.

        eos_token_ids: those that end a text, and are no part of it.
        """
        self._backend, self._vocab_size = backend, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._pool = ThreadPoolExecutor(NUM_THREADS, "grammars")
        self._starting = Lock()
        self._started: tuple[Compiler, Trials] | None = None
        self._lock = Lock()  # of the two below: the engine's thread takes it, and nothing under it takes time
        self._known: WeakValueDictionary[StructuredOutputsParams, Future[LLMatcher]] = WeakValueDictionary()
        self._latest: OrderedDict[StructuredOutputsParams, Future[LLMatcher]] = OrderedDict()

    def prepare(self, params: SamplingParams) -> Future[LLMatcher] | None:
        """Have the grammar compiled, if there is one; who holds the future does not wait in `matchers` once
        it is done. It raises InvalidSampling."""
        spec = params.structured_outputs
        return self._find(spec) if isinstance(spec, StructuredOutputsParams) else None

    def matchers(self, params: SamplingParams, end_token_ids: frozenset[int]) -> Sequence[Matcher | None]:
        """Return a matcher for each completion of a request, or None for free text.

        end_token_ids: every id that ends the completion. Raises InvalidSampling where a grammar cannot be
        compiled.
        """
        found = self.prepare(params)
        if found is None:
            return [None] * params.n
        try:
            compiled = found.result()
        except InvalidSampling as error:
            raise InvalidSampling(*error.args) from None  # that one is for all who ask
        assert self._started is not None
        shared = (
            compiled,
            self._started[0].vocabulary,
            end_token_ids,
            allowed_mask(params, self._vocab_size),
        )
        return [Matcher(compiled.deep_copy(), *shared) for _ in range(params.n)]

    def close(self) -> None:
        """Compile no more, and end the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._starting:
            if self._started is not None:
                self._started[1].close()

    def _find(self, spec: StructuredOutputsParams) -> Future[LLMatcher]:
        with self._lock:
            found = self._known.get(spec)
            if found is None:
                with stacks_of(2 * STACK_BYTES):  # of the threads, more than in a trial
                    found = self._pool.submit(self._compile, spec)
                self._known[spec] = found
            self._latest[spec] = found
            self._latest.move_to_end(spec)
            if len(self._latest) > MAX_GRAMMARS:
                self._latest.popitem(last=False)
        return found

    def _compile(self, spec: StructuredOutputsParams) -> LLMatcher:
        compiler, trials = self._start()
        try:
            return compiler.compile(spec, trials.grammar_of(spec))
        except NotTried:
            with self._lock:  # so that the next one who asks tries it again
                self._known.pop(spec, None)
                self._latest.pop(spec, None)
            raise

    def _start(self) -> tuple[Compiler, Trials]:
        """Read the vocabulary, which takes up to a second. Raises InvalidSampling if that cannot be."""
        with self._starting:
            if self._started is None:
                vocabulary = self._vocabulary()
                self._started = Compiler(**vocabulary), Trials(vocabulary)
            return self._started

    def _vocabulary(self) -> dict[str, Any]:
        """The arguments of a Compiler."""
        if self._backend is None:
            raise InvalidSampling(
                f"{NAME} needs a tokenizer of the tokenizers package, which this model has not"
            )
        known = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return {
            "tokenizer": self._backend.to_str(),
            "num_tokens": max(known, self._vocab_size),
            "eos_token_ids": self._eos_token_ids,
        }
