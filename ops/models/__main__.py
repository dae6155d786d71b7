"""Which models of transformers are exact here: `python -m ops.models [--all] [TYPE ...]`.

Makes a small random checkpoint of each model that generates text, and compares greedy tokens with transformers'
own, computed without a cache: exact, or refused with the reason. --all: in six modes. Exits with 1 where tokens
differ, or something fails without a name.
"""

import logging
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from engine import ConfigError, Engine
from engine.attention.kv_cache import block_bytes
from engine.run.forward.model_runner import ModelRunner
from ops.models.checkpoints import CAUSAL, WITH_IMAGES, make
from tests.engine.family_runs import BLOCK_SIZE, MODES, NUM_NEW_TOKENS, config_of, prompts, run
from tests.engine.picture_models import compared as compared_with_pictures
from tests.engine.reference import Reference

NOT_MADE, WRONG = "not made", "WRONG"
SIX: dict[str, Mapping[str, Any]] = {
    "whole": {},
    "uncached": {"enable_prefix_caching": False},
    "chunks": MODES["chunks"],
    "preempted": {"pool_blocks": 11},
    "all": MODES["all"],
}


def main() -> int:
    """Print a line for each model, and how many came to what."""
    chosen = {*sys.argv[1:]} - {"--all"}
    counts = Counter[tuple[str, str]]()
    for title, names in ("causal", CAUSAL), ("with images or sound", WITH_IMAGES):
        for model_type in sorted(chosen & set(names) or (set() if chosen else names)):
            with tempfile.TemporaryDirectory() as folder:
                found = compared(Path(folder), names, model_type, six_modes="--all" in sys.argv)
                counts[title, found.partition(":")[0]] += 1
                if names is WITH_IMAGES:
                    seen = compared_with_pictures(Path(folder) / "pictures", model_type)
                    counts["their pictures", seen.partition(":")[0].partition(" (")[0]] += 1
                    found += f"; pictures {seen}"
            print(f"{model_type:26} {names[model_type]:44} {found}", flush=True)
    for (title, found), number in sorted(counts.items()):
        print(f"{number:4} {title}: {found}")
    return int(any(found == WRONG for _, found in counts))


def compared(folder: Path, names: Mapping[str, str], model_type: str, *, six_modes: bool) -> str:
    """Say what comes of one model: "exact" or another of the words, and after a colon the reason."""
    try:
        kind = make(folder, names, model_type)
    except Exception as error:  # noqa: BLE001 - whatever it is, the next model has its turn
        return f"{NOT_MADE}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    try:
        way, differences = differences_of(reference_of(folder, kind), six_modes=six_modes)
    except ConfigError as error:
        return f"refused: {error}".replace(f"{folder}/", "")
    except Exception as error:  # noqa: BLE001 - it has no name, which is what is looked for
        found = NOT_MADE if "allocate memory" in str(error) else WRONG
        return f"{found}: {type(error).__name__}: {error}"
    return f"{WRONG}: {'; '.join(differences)[:300]}" if differences else f"exact: {way}"


def reference_of(folder: Path, kind: Any, asked: list[list[int]] | None = None) -> Reference:
    """A class of transformers as it is, whichever it is."""
    return Reference(
        folder, asked or prompts(), num_new_tokens=NUM_NEW_TOKENS, use_cache=False, kind=kind
    )


def differences_of(reference: Reference, *, six_modes: bool) -> tuple[str, list[str]]:
    """Return how it is served, and the differences from transformers in each mode."""
    with Engine(config_of(reference.folder, "whole", block_bytes=1 << 16)) as built:
        runner = built._open_runner()
        assert isinstance(runner, ModelRunner)
        way = (
            "natively"
            if type(runner.model).__name__.startswith("Decoder")
            else "through transformers"
        )
        size = block_bytes(
            runner.model.attention_layers, BLOCK_SIZE, torch.float32, runner.model.index_keys
        )
    found = [
        f"{mode}: {difference}"
        for mode, changes in (SIX if six_modes else {"all": MODES["all"]}).items()
        for difference in run(reference, "whole", block_bytes=size, **changes)[0][:1]
    ]
    if six_modes:
        shorter = [
            prompt[: 1 + len(prompt) // (2 + i % 3)] for i, prompt in enumerate(prompts()[::-1])
        ]
        others = reference_of(reference.folder, reference.kind, shorter)
        found += [
            f"other lengths: {each}" for each in run(others, "whole", block_bytes=size)[0][:1]
        ]
    return way, found


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    resource.setrlimit(
        resource.RLIMIT_AS, (12 << 30, 12 << 30)
    )  # some classes cannot be made small
    torch.set_num_threads(1)
    set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers leaves them untyped
    disable_progress_bar()  # type: ignore[no-untyped-call]
    sys.exit(main())
