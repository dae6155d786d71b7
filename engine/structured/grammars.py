"""Grammars: compiles the forms of requests, each once, after a trial in a separate process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from engine.errors import InvalidSampling
from engine.sampling.logit_edits import allowed_mask
from engine.sampling.sampling_params import SamplingParams
from engine.sampling.structured_params import NAME, WHITESPACE, StructuredOutputsParams
from engine.structured.byte_tokenizer import tokenizer_of_bytes
from engine.structured.compiler import STACK_BYTES, Compiler, stacks_of, unusable
from engine.structured.forced_calls import name_of
from engine.structured.matcher import SMALL_VOCABULARY, Matcher
from sandbox import Child, ChildFailed, Limits, Pool
from sandbox.exhausted import is_exhausted

if TYPE_CHECKING:
    from llguidance import LLMatcher


LIMIT_S = 5.0  # that a form may take
BEGIN_LIMIT_S = 60.0  # that reading the vocabulary may take
MEMORY_BYTES = 256 << 20  # of a process, beside the vocabulary; grammars take some 40 MB
MAX_GRAMMARS = 64  # that are kept beside those that somebody holds
NUM_THREADS = 2  # so that a form that takes long leaves one for others

_VOCABULARY = "engine.structured.trial_child:read_vocabulary"
_FORM = "engine.structured.trial_child:try_form"


class NotTried(InvalidSampling):
    """Raised if no process could try a form, which is no fault of the form's."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{NAME} cannot be compiled here: no process for it starts", str(error))


def _begin(vocabulary: Mapping[str, Any], child: Child) -> None:
    try:
        child.ask(_VOCABULARY, vocabulary, Limits(BEGIN_LIMIT_S))
    except ChildFailed as error:
        raise NotTried(error) from None


def _tried(spec: StructuredOutputsParams, children: Pool) -> str:
    """Return the grammar of a form that compiled in a child. Raises InvalidSampling, or NotTried."""
    form = {spec.kind: getattr(spec, spec.kind), WHITESPACE: spec.allow_whitespace}
    try:
        reply, _ = children.call(
            lambda child: child.ask(_FORM, form, Limits(LIMIT_S, MEMORY_BYTES))
        )
    except ChildFailed as error:
        raise unusable(spec, f"whose compilation {error}") from None
    except OSError as error:
        if is_exhausted(error):
            raise
        raise NotTried(error) from None
    if "refused" in reply:
        raise InvalidSampling(*reply["refused"])
    return str(reply["grammar"])


class Grammars:
    """The grammars of a model's tokenizer, for any thread. A new form is first tried in a separate process."""

    def __init__(
        self,
        backend: Any,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        forced_calls: Callable[[SamplingParams], StructuredOutputsParams] | None = None,
    ) -> None:
        """backend: the model's `tokenizers.Tokenizer`; None if it has none. vocab_size: the number of logits.

        eos_token_ids: ids that end a text, and are no part of it. forced_calls: makes the form of a request's text if
        the text must be, or may be, a call of a tool.
        """
        self._forced_calls = forced_calls
        self._backend = backend
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._pool = ThreadPoolExecutor(NUM_THREADS, "grammars")
        self._starting = Lock()
        self._started: tuple[Compiler, Pool] | None = None
        # Guards `_known` and `_latest`. The engine's thread takes this lock, so nothing slow is done under it.
        self._lock = Lock()
        self._known: WeakValueDictionary[StructuredOutputsParams, Future[LLMatcher]] = (
            WeakValueDictionary()
        )
        self._latest: OrderedDict[StructuredOutputsParams, Future[LLMatcher]] = OrderedDict()

    def begin(self) -> Future[None] | None:
        """Begin to read a large vocabulary, here and in a child process, so that the first form need not wait.

        Returns None for a small vocabulary: it is read when the first form comes, in less than a second. If reading
        fails, the first form gets the error.
        """
        if self._backend is None or self._vocab_size < SMALL_VOCABULARY:
            return None
        with stacks_of(2 * STACK_BYTES):
            return self._pool.submit(self._begin_child)

    @contextmanager
    def begun(self, is_needed: bool) -> Iterator[None]:
        """Read a large vocabulary while the `with` block runs, if is_needed. Close the grammars if the block raises."""
        if is_needed:
            self.begin()
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _begin_child(self) -> None:
        _, children = self._start()
        with children.lent():
            pass

    def prepare(self, params: SamplingParams) -> Future[LLMatcher] | None:
        """Begin to compile a request's grammar; return None if it has none. Raises InvalidSampling, as the future does.

        Keep the future until `matchers` is called: a grammar whose future nobody keeps may be forgotten.
        """
        spec = self._form(params)
        return None if spec is None else self._prepared(spec)

    def _form(self, params: SamplingParams) -> StructuredOutputsParams | None:
        """Return the form of a request's text. Raises InvalidSampling for a call that cannot be forced."""
        if self._has_calls(params) and self._forced_calls is not None:
            return self._forced_calls(params)
        return (
            params.structured_outputs
            if isinstance(params.structured_outputs, StructuredOutputsParams)
            else None
        )

    def _has_calls(self, params: SamplingParams) -> bool:
        """Whether the form of a request's text is written around calls of its tools."""
        has_both = params.structured_outputs is not None and bool(params.tools)
        return params.tool_choice is not None or has_both

    def _prepared(self, spec: StructuredOutputsParams) -> Future[LLMatcher]:
        with self._lock:
            future = self._known.get(spec)
            if future is None:
                with stacks_of(2 * STACK_BYTES):  # larger than in a trial
                    future = self._pool.submit(self._compile, spec)
                self._known[spec] = future
            self._latest[spec] = future
            self._latest.move_to_end(spec)
            if len(self._latest) > MAX_GRAMMARS:
                self._latest.popitem(last=False)
        return future

    def matchers(
        self, params: SamplingParams, end_token_ids: frozenset[int]
    ) -> Sequence[Matcher | None]:
        """Return a matcher for each completion of a request, or None for free text. Raises InvalidSampling.

        end_token_ids: every id that ends the completion.
        """
        spec = self._form(params)
        if spec is None:
            return [None] * params.n
        try:
            compiled = self._prepared(spec).result()
        except InvalidSampling as error:
            # A new error is raised for each request, as all requests of the form share the future's error.
            if self._has_calls(params) and error.got is not None:
                needed = "tools" if params.tool_choice is not None else "a form and tools"
                wanted = f"{name_of(params)} needs {needed} that can be enforced"
                raise InvalidSampling(wanted, error.got) from None
            raise InvalidSampling(*error.args) from None
        assert self._started is not None
        vocabulary = self._started[0].vocabulary
        allowed = allowed_mask(params.allowed_token_ids, self._vocab_size)
        forget = partial(self._forget, spec)
        return [
            Matcher(compiled.deep_copy(), compiled, vocabulary, end_token_ids, allowed, forget)
            for _ in range(params.n)
        ]

    def close(self) -> None:
        """Stop compiling, and end the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._starting:
            if self._started is not None:
                # Killed, so that a thread that waits for a reply gets an error now.
                self._started[1].close(kill=True)

    def _compile(self, spec: StructuredOutputsParams) -> LLMatcher:
        compiler, children = self._start()
        try:
            return compiler.compile(spec, _tried(spec, children))
        except Exception as error:
            if isinstance(error, NotTried) or is_exhausted(error):
                self._forget(spec)
            raise

    def _forget(self, spec: Any) -> None:
        """Forget a form's grammar, so that the next request for it has it compiled again."""
        with self._lock:
            self._known.pop(spec, None)
            self._latest.pop(spec, None)

    def _start(self) -> tuple[Compiler, Pool]:
        """Read the vocabulary in the first call, which takes up to ten seconds. Raises InvalidSampling if it fails."""
        with self._starting:
            if self._started is None:
                if self._backend is None:
                    raise InvalidSampling(
                        f"{NAME} needs a tokenizer of the tokenizers package; this model has none"
                    )
                token_ids = self._backend.get_vocab(with_added_tokens=True).values()
                num_known = max(token_ids, default=-1) + 1
                added = self._backend.get_added_tokens_decoder()
                vocabulary: dict[str, Any] = {
                    "tokenizer": tokenizer_of_bytes(self._backend.to_str()),
                    "num_tokens": max(num_known, self._vocab_size),
                    "eos_token_ids": self._eos_token_ids,
                    "control_tokens": {
                        token.content: token_id for token_id, token in added.items()
                    },
                }
                self._started = Compiler(**vocabulary), Pool(partial(_begin, vocabulary))
            return self._started
