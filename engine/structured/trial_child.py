"""The process in which forms are tried: for each that it reads it writes its grammar, or why there is none.

It ends at the first form that overruns its stack or its memory, and then nobody else does.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.errors import InvalidSampling
from engine.sampling.structured_outputs import StructuredOutputsParams
from engine.structured.compiler import STACK_BYTES, Compiler, grammar_of, stacks_of

#: Of the stack on which its masks are tried: less than threads that take steps have, and llguidance's own.
MASK_STACK_BYTES = 1 << 20

#: Beside the vocabulary. Grammars take some 40 MB.
MEMORY_BYTES = 256 << 20


def main(fd: int) -> None:
    """Answer through the file descriptor until nobody asks any more."""
    pipe = Connection(fd)
    compiler = Compiler(**json.loads(pipe.recv_bytes()))
    deep, shallow = _thread(STACK_BYTES), _thread(MASK_STACK_BYTES)
    _limit_memory()
    pipe.send_bytes(b"{}")
    nothing = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    while True:
        try:
            question = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        # Who asked may be gone: then nobody ends a form that goes on for ever but this.
        faulthandler.dump_traceback_later(question["limit_s"], exit=True, file=nothing)
        pipe.send_bytes(json.dumps(_reply(compiler, question["form"], deep, shallow)).encode())
        faulthandler.cancel_dump_traceback_later()


def _reply(
    compiler: Compiler, form: dict[str, Any], deep: ThreadPoolExecutor, shallow: ThreadPoolExecutor
) -> dict[str, Any]:
    spec = StructuredOutputsParams(**form)
    try:
        grammar = grammar_of(spec)
        compiled = deep.submit(compiler.compile, spec, grammar).result()
        shallow.submit(compiler.try_out, spec, compiled).result()
    except InvalidSampling as error:
        return {"refused": error.args}
    return {"grammar": grammar}


def _thread(stack_bytes: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1)
    with stacks_of(stack_bytes):
        pool.submit(int)
    return pool


def _limit_memory() -> None:
    """Allow MEMORY_BYTES more than there are now, where the system counts them, and no file of them all."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
    except OSError:
        return
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
