"""Every family in every mode, its greedy tokens against transformers': `python -m ops.families`.

Prints a line for each family: for each mode "ok", or how many of the prompts got other tokens. Needs the test
suite's dependencies and runs from the repository's root. The test suite has a sample of it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.utils import logging as transformers_logging

from tests.engine.families import BY_NAME
from tests.engine.family_runs import MODES, outcome, reference_of, run


def main() -> int:
    """Run the chosen families and modes; 1 if any token was another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="", help="families whose name has this in it; by default all")
    parser.add_argument("--mode", choices=MODES, help="by default all of them")
    parser.add_argument(
        "--backend", default="torch", help="attention_backend; triton needs TRITON_INTERPRET=1 on a CPU"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("engine").setLevel(logging.ERROR)  # a warning would break a line of the table
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    modes = [options.mode] if options.mode else list(MODES)
    num_failed = 0
    print(f"{'':24}" + "".join(f"{mode:>12}" for mode in modes) + f"{'seconds':>12}", flush=True)
    for name in (name for name in BY_NAME if options.family in name):
        started = time.monotonic()
        print(f"{name:24}", end="", flush=True)
        with TemporaryDirectory() as folder:
            reference = reference_of(Path(folder), BY_NAME[name])
            for mode in modes:
                found = outcome(mode, partial(run, reference, mode, options.backend))
                num_failed += found != "ok"
                print(f"{found:>12}", end="", flush=True)
        print(f"{time.monotonic() - started:12.0f}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
