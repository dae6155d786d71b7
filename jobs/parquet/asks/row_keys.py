"""Names what a row asks in 128 bits: rows of any runs with equal keys have the same answer from the same model."""

import json
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from jobs.common.display import brief
from jobs.context.served_model import PinnedModel
from jobs.parquet.prompts.prompt_source import Row
from jobs.runs.plans.names import OPENAI_BATCH
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request

Keys = npt.NDArray[np.uint64]
"""Keys, (rows, 2): those of rows without an answer to be taken are zeros."""

SIZE = 16

_TRUNCATION = "truncate_prompt_tokens"

#: Arguments of where the input lies, and of how the output is cut and shown.
_OF_FILES = frozenset(
    {
        "input",
        "output",
        "input_format",
        "limit",
        "rows_per_shard",
        "filename_column",
        "single_file",
        "keep",
        "drop",
        "output_prefix",
        "only_new",
        "reused_column",
        "order",
        "escalate_to",
        "escalate_model",
    }
)

#: Arguments that decide no answer, or that decide it by way of the prompt alone. All others decide the answer.
_NOT_ASKED = _OF_FILES | {
    "model_alias",
    "prompt_column",
    "messages_column",
    "query_column",
    "document_column",
    "template",
    "image_column",
    "sampling_columns",
    "check_columns",
    "escalate_below",
}

#: These make prompts too, but later ones of a row are made from them once the first is answered.
_OF_PROMPTS = frozenset(["defaults", "template_format"])

NO_KEYS: Keys = np.empty((0, 2), np.uint64)


class RowKeys:
    """The keys of a run's rows.

    before: what is asked before all rows. check: the version of its check's function. max_model_len: the model's
    length, which decides where `truncate_prompt_tokens` cuts a prompt. seed: Plan.given_seed.
    """

    def __init__(
        self,
        spec: RunSpec,
        before: Request | None,
        check: str,
        max_model_len: int = 0,
        seed: int | None = None,
    ) -> None:
        self._has_lines = spec.input_format == OPENAI_BATCH
        left_out = _NOT_ASKED if spec.prompts else _NOT_ASKED | _OF_PROMPTS
        asked: dict[str, Any] = {
            name: each for name, each in spec.to_json().items() if name not in left_out
        }
        asked |= {"chat": spec.is_chat, "lines": self._has_lines, "function": check}
        if before is not None:
            asked["before"] = [before.prompt, before.messages]
        self._length = f"{_TRUNCATION}={max_model_len}"
        if _TRUNCATION in spec.sampling:
            asked["length"] = self._length
        # 0 and 0.0 are the same value; inside a schema or a tool the order of keys decides what is answered.
        asked["sampling"] = dict(sorted(given_sampling(spec, seed).items()))
        text = json.dumps(json.loads(json.dumps(dict(sorted(asked.items()))), parse_float=_number))
        #: Names what is asked of all rows: another text once anything of it is another, a check's function too.
        self.name = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=SIZE).hexdigest()

    def of(self, row: Row) -> bytes:
        """Return a row's key; its prompt has the hashes of its pictures."""
        found = blake2b(digest_size=SIZE, key=self.name.encode())
        beside = ["pictures"] if row.pictures else []
        if _TRUNCATION in row.sampling or (self._has_lines and _TRUNCATION in row.prompt):
            beside.append(self._length)
        for text in (row.prompt, row.sampling, row.values, *beside):
            encoded = text.encode("utf-8", "surrogatepass")
            found.update(len(encoded).to_bytes(8, "little"))
            found.update(encoded)
        return found.digest()


def given_sampling(spec: RunSpec, seed: int | None) -> dict[str, Any]:
    """Return the sampling values that a run was given, with this seed if there is one. seed: Plan.given_seed."""
    return dict(spec.sampling) if seed is None else {**spec.sampling, "seed": seed}


def differences(old: Plan, new: Plan, *, any_model: bool) -> list[str]:
    """Say what two runs ask differently, value by value. any_model: leave out the model."""
    found = []
    models = {each.fingerprint for each in (new.model, new.second) if each is not None}
    if not any_model and old.model.fingerprint not in models:
        found.append(f"model {old.model} there, {new.model} here")
    if old.model.max_model_len != new.model.max_model_len:
        found.append(
            f"max_model_len {old.model.max_model_len} there, {new.model.max_model_len} here"
        )
    theirs, ours = _asked(old), _asked(new)
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            found.append(f"{name} {_shown(theirs.get(name))} there, {_shown(ours.get(name))} here")
    return found


def _asked(plan: Plan) -> dict[str, Any]:
    of_spec = {
        name: value
        for name, value in plan.spec.to_json().items()
        if name not in _OF_FILES | {"sampling"}
    }
    return {**of_spec, **given_sampling(plan.spec, plan.given_seed)}


def _shown(value: Any) -> str:
    return "not given" if value is None else brief(value)


def row_keys(key_of: Callable[[Row], bytes], rows: Iterable[Row | object]) -> Keys:
    """Return the key of each row, without a model; zeros for what asks nothing."""
    return as_keys(
        b"".join(key_of(row) if isinstance(row, Row) else bytes(SIZE) for row in rows)
    ).copy()


def model_mark(model: PinnedModel) -> Keys:
    """Return what a model adds, by exclusive or, to the keys of rows that it has answered: one key, (1, 2)."""
    return as_keys(blake2b(model.identity.encode(), digest_size=SIZE, person=b"model").digest())


def as_keys(found: bytes | bytearray) -> Keys:
    return np.frombuffer(found, "<u8").reshape(-1, 2)


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value
