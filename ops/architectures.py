"""Every architecture that was tried through transformers: `python -m ops.architectures`.

Prints a line for each one that is served: for each mode "ok", or how many prompts got other tokens than
transformers gives by itself. Then the refused ones, each with the engine's reason, which is found without the
table that refuses them at sight. Needs the test suite's dependencies and runs from the repository's root. The
test suite has a sample of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.utils import logging as transformers_logging

from engine import Engine, EngineConfig, EngineError
from tests.engine.architectures import REFUSED, SERVED, ArchitectureRuns, add_sizes, make_architecture
from tests.engine.family_runs import MODES, outcome


def main() -> int:
    """Run the chosen architectures and modes; 1 if any token was another, or a refused one is served."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="", help="those whose model type has this in it; by default all")
    parser.add_argument(
        "--mode", choices=MODES, action="append", help="by default all but tp2; may be repeated"
    )
    parser.add_argument("--backend", default="torch", help="attention_backend")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    modes = options.mode or [mode for mode in MODES if mode != "tp2"]
    num_failed = 0
    print(f"{'':24}" + "".join(f"{mode:>12}" for mode in modes) + f"{'seconds':>12}", flush=True)
    for name in (name for name in SERVED if options.name in name):
        started = time.monotonic()
        print(f"{name:24}", end="", flush=True)
        with TemporaryDirectory() as folder:
            runs = ArchitectureRuns(Path(folder), name)
            for mode in modes:
                found = outcome(mode, partial(runs.run, mode, options.backend))
                num_failed += found != "ok"
                print(f"{found:>12}", end="", flush=True)
        print(f"{time.monotonic() - started:12.0f}", flush=True)
    for name in (name for name in REFUSED if options.name in name):
        reason = _refusal(name)
        num_failed += reason is None
        print(f"{name:24}  {reason or 'is served'}", flush=True)
    return 1 if num_failed else 0


def _refusal(name: str) -> str | None:
    with TemporaryDirectory() as folder:
        add_sizes(make_architecture(Path(folder), name))
        config = EngineConfig(folder, model_path="transformers", max_model_len=100, kv_cache_bytes=1 << 22)
        try:
            Engine(config).close()
        except EngineError as error:
            return str(error).replace(folder, "the folder")
    return None


if __name__ == "__main__":
    sys.exit(main())
