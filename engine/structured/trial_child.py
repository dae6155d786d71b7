"""The child process that tries forms: it returns a grammar for each, or why there is none."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.errors import InvalidSampling
from engine.sampling.structured_params import StructuredOutputsParams
from engine.structured.compiler import STACK_BYTES, Compiler, stacks_of
from sandbox.child import Worker, unlimited_memory

#: Bytes of the stack on which a form's masks are tried: less than the threads that take steps have, or llguidance's.
MASK_STACK_BYTES = 1 << 20


_trial: Callable[[StructuredOutputsParams], str] | None = None


def read_vocabulary(worker: Worker) -> Iterator[dict[str, Any]]:
    """Read the vocabulary with which forms are tried. Its memory does not count towards a form's limit."""
    global _trial
    with unlimited_memory():
        compiler = Compiler(**worker.question)
        # Each of the two steps has a thread of its own, with a smaller stack than it has in the engine.
        compiling_thread = _thread(STACK_BYTES)
        mask_thread = _thread(MASK_STACK_BYTES)

    def tried(spec: StructuredOutputsParams) -> str:
        grammar = compiler.grammar_of(spec)
        compiled = compiling_thread.submit(compiler.compile, spec, grammar).result()
        mask_thread.submit(compiler.try_out, spec, compiled).result()
        return grammar

    _trial = tried
    yield {}


def try_form(worker: Worker) -> Iterator[dict[str, Any]]:
    """Compile a form, and find its first token."""
    assert _trial is not None
    try:
        yield {"grammar": _trial(StructuredOutputsParams(**worker.question))}
    except InvalidSampling as error:
        yield {"refused": error.args}


def _thread(stack_bytes: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1)
    with stacks_of(stack_bytes):
        pool.submit(int)
    return pool
