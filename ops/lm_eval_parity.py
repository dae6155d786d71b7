"""Scores of lm-evaluation-harness with the engine, against those of its `hf` class, and the time of both.

    pip install -c ops/constraints.txt -e '.[eval]' accelerate
    OMP_NUM_THREADS=1 python -m ops.lm_eval_parity [--models demo llama gemma2] [--hf-batches 1 8] [--docs 60]

Tasks are written with their data: dates to choose among behind a few-shot context that all rows share, dates
to generate, and texts longer than the model reads. A model is the demo's, a random one of a family, or a
folder; all in float32. Every answer is compared, log likelihoods within 1e-4 or 1e-5 of themselves, and
every score; the exit status is 1 if any differs. Times are of the processor.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.demo.dates import Example, held_out_examples
from ops.demo.random_model import make_model

TOLERANCE = 1e-4
DEMO = Path(__file__).parent / "demo" / "model"
METHODS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
NUM_CHOICES, NUM_SHOTS, GENERATED = 8, 8, 24

COMMON = """\
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/{data}.jsonl
test_split: test
"""
COMMON_WITH_SHOTS = """\
dataset_path: json
dataset_kwargs:
  data_files:
    train: {folder}/shots.jsonl
    test: {folder}/{data}.jsonl
test_split: test
fewshot_split: train
fewshot_config:
  sampler: first_n
"""
TASKS = {
    "tm_choice": """\
output_type: multiple_choice
num_fewshot: {shots}
doc_to_text: "{{{{text}}}} =>"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "tm_generate": """\
output_type: generate_until
num_fewshot: 2
doc_to_text: "{{{{text}}}} =>"
doc_to_target: " {{{{truth}}}}"
generation_kwargs:
  until: ["\\n\\n", "20"]
  max_gen_toks: {generated}
metric_list:
  - metric: chrf
  - metric: exact_match
""",
    "tm_rolling": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{page}}}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
""",
}


def write_tasks(folder: Path, num_docs: int) -> None:
    """The tasks' definitions and data."""
    examples = held_out_examples(num_docs + NUM_SHOTS)
    draw = random.Random(0)
    rows = [_row(example, examples, draw) for example in examples]
    _write(folder / "shots.jsonl", rows[:NUM_SHOTS])
    _write(folder / "rows.jsonl", rows[NUM_SHOTS:])
    pages = [
        {"page": "\n".join(draw.choice(examples).text for _ in range(count))} for count in (1, 3, 40, 90)
    ]
    _write(folder / "pages.jsonl", pages)
    for name, definition in TASKS.items():
        values = {"folder": folder, "shots": NUM_SHOTS, "generated": GENERATED}
        values["data"], head = ("pages", COMMON) if name == "tm_rolling" else ("rows", COMMON_WITH_SHOTS)
        text = f"task: {name}\n{head}{definition}"
        (folder / f"{name}.yaml").write_text(text.format(**values), encoding="utf-8")


def _row(example: Example, others: list[Example], draw: random.Random) -> dict[str, Any]:
    wrong = sorted({other.truth for other in others} - {example.truth})
    choices = [example.truth, *draw.sample(wrong, NUM_CHOICES - 1)]
    draw.shuffle(choices)
    label = choices.index(example.truth)
    return {"text": example.text, "truth": example.truth, "choices": choices, "label": label}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@dataclass
class Outcome:
    """What a model made of the tasks, and the processor seconds that each kind of request took."""

    scores: dict[str, dict[str, Any]]
    answers: dict[str, list[Any]]
    seconds: dict[str, float] = field(default_factory=dict)


def evaluate(model: Any, tasks: Any, **options: Any) -> Outcome:
    """Run the harness on a model."""
    import lm_eval

    seconds: dict[str, float] = {}
    for name in METHODS:
        setattr(model, name, _timed(getattr(type(model), name).__get__(model), name, seconds))
    found = lm_eval.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0, **options
    )
    scores = {
        task: {name: value for name, value in values.items() if not name.startswith(("alias", "name"))}
        for task, values in found["results"].items()
    }
    answers = {
        task: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for task, samples in found["samples"].items()
    }
    return Outcome(scores, answers, seconds)


def _timed(ask: Callable[..., Any], name: str, seconds: dict[str, float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.process_time()
        answers = ask(*arguments, **options)
        seconds[name] = time.process_time() - start
        return answers

    return timed


def differences(ours: Outcome, theirs: Outcome) -> Iterator[str]:
    """What is not the same."""
    for task, answers in theirs.answers.items():
        for number, (own, other) in enumerate(zip(ours.answers[task], answers, strict=True)):
            if not is_same(own, other):
                yield f"{task} {number}: {own!r} is not {other!r}"
        for name, value in theirs.scores[task].items():
            own = ours.scores[task][name]
            # of log likelihoods that are not the same bits, a perplexity is not either
            if own != value and not (task == "tm_rolling" and math.isclose(own, value, rel_tol=TOLERANCE)):
                yield f"{task} {name}: {own} is not {value}"


def is_same(own: Any, other: Any) -> bool:
    """Of texts and flags the same; of numbers within TOLERANCE, or a hundred-thousandth of large ones."""
    if isinstance(own, (list, tuple)):
        return len(own) == len(other) and all(map(is_same, own, other))
    if isinstance(own, float):
        return math.isclose(own, other, abs_tol=TOLERANCE, rel_tol=1e-5)
    same: bool = own == other
    return same


def largest(own: Any, other: Any) -> float:
    """The largest difference of two numbers that stand in the same place."""
    if isinstance(own, (list, tuple)):
        return max((largest(*pair) for pair in zip(own, other, strict=True)), default=0.0)
    return abs(own - other) if isinstance(own, float) else 0.0


def main() -> None:
    """Compare on each model; print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo", "llama", "gemma2"])
    parser.add_argument("--hf-batches", nargs="+", default=["1", "8"], help="batch sizes of the hf class")
    parser.add_argument("--docs", type=int, default=60, help="rows of each task")
    options = parser.parse_args()
    os.environ["TQDM_DISABLE"] = "1"
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["HF_HOME"] = scratch  # where the harness keeps what it reads
        folder = Path(scratch) / "tasks"
        folder.mkdir()
        write_tasks(folder, options.docs)
        for name in options.models:
            model = DEMO if name == "demo" else Path(name)
            if not model.is_dir():
                model = make_model(Path(scratch) / name, name)
            for hf_batch in options.hf_batches:
                for chat in (False, True):
                    wrong += compare(name, model, folder, hf_batch, chat)
    sys.exit(1 if wrong else 0)


def compare(name: str, folder: Path, tasks_folder: Path, hf_batch: str, chat: bool) -> int:
    """Both on one model; returns how much differs."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from tokenmill_eval.model import TokenmillLM

    tasks = TaskManager(include_path=str(tasks_folder), include_defaults=False)
    arguments = {"apply_chat_template": chat, "fewshot_as_multiturn": chat}
    size = hf_batch if hf_batch == "auto" else int(hf_batch)
    hf = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=size)
    theirs = evaluate(hf, tasks, **arguments)
    model = TokenmillLM(pretrained=str(folder), device="cpu", dtype="float32", kv_cache_bytes=1 << 26)
    ours = evaluate(model, tasks, **arguments)
    before = model.engine.stats()
    model.close()
    found = list(differences(ours, theirs))
    print(f"\n{name}, {'chat' if chat else 'plain'}, hf with batches of {hf_batch}")
    print(f"  scores: {ours.scores}")
    print(f"  tokens computed {before.prefill_tokens}, from the cache {before.cached_tokens}")
    for method, seconds in theirs.seconds.items():
        own = ours.seconds[method]
        print(f"  {method}: {own:.2f} s, hf {seconds:.2f} s, {seconds / own:.1f} times as long")
    for task in theirs.answers:
        print(f"  {task}: numbers differ by {largest(ours.answers[task], theirs.answers[task]):.1e} at most")
    print(f"  {len(found)} differences", *found[:5], sep="\n    ", flush=True)
    return len(found)


if __name__ == "__main__":
    main()
