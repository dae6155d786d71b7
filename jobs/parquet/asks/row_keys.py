"""Makes keys of 128 bits. A row's key names what the row asks. Its whole key also names the model that answers.

A row's key covers all that the row is asked, and the files of the adapters that may answer it. A model's mark is a hash
of the model's identity. A whole key joins a row's key and a model's mark. Rows with equal whole keys have the same
answer, in any run. Files hold only whole keys, and so does a worker's memory of answers.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from jobs.common.display import brief
from jobs.context.adapters import Adapters, shown_adapter
from jobs.context.served_model import PinnedModel
from jobs.parquet.asks.named_adapters import names_in_arguments, names_in_row
from jobs.parquet.prompts.prompt_source import Row
from jobs.runs.plans.dialects import DIALECT
from jobs.runs.plans.names import OPENAI_BATCH
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request

Keys = npt.NDArray[np.uint64]
"""Keys of rows or marks of models, [number of keys, 2]. A key of zeros belongs to a row that asks nothing."""

#: The bytes of a key, and of a model's mark.
SIZE = 16

#: The most adapters that a difference lists for a run.
_MAX_ADAPTERS_SHOWN = 4

#: The adapters of a run that names none.
NO_ADAPTERS = Adapters()

_TRUNCATION = "truncate_prompt_tokens"

#: Arguments that say where the input lies, how its files are read, and how the output is cut and shown.
_FILE_ARGUMENTS = frozenset(
    {
        "input",
        "output",
        "input_format",
        *DIALECT,
        "limit",
        "rows_per_shard",
        "filename_column",
        "single_file",
        "keep",
        "drop",
        "output_prefix",
        "parse",
        "only_new",
        "reused_column",
        "order",
        "escalate_to",
        "escalate_model",
    }
)

#: Arguments that do not change an answer, or that change it only through the prompt. All other arguments decide the
#: answer.
_NOT_DECIDING = _FILE_ARGUMENTS | {
    "model_alias",
    "inline_pictures",
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

#: Arguments that decide a row's later prompts, which do not exist yet when the row gets its key. If a row has only one
#: prompt, these arguments change an answer only through that prompt.
_LATER_PROMPT_ARGUMENTS = frozenset(["defaults", "template_format"])

NO_KEYS: Keys = np.empty((0, 2), np.uint64)


class RowKeys:
    """The keys of a run's rows.

    opening_request: the request that is sent before the rows are asked; None if the run has no such request.
    functions_version: see RunSpec.functions_version.
    max_model_len: the model's length, which decides where `truncate_prompt_tokens` cuts a prompt.
    seed: Plan.given_seed. adapters: the adapters that the run has pinned.
    """

    def __init__(
        self,
        spec: RunSpec,
        opening_request: Request | None,
        functions_version: str,
        max_model_len: int = 0,
        seed: int | None = None,
        adapters: Adapters = NO_ADAPTERS,
    ) -> None:
        self._spec = spec
        # For each text by which rows may name an adapter, the adapter's pinned text: its name with a hash of its files.
        self._pinned = {name: adapters.pin(name) for name in adapters.names}
        self._adapters_of_run = names_in_arguments(spec)
        self._is_batch_file = spec.input_format == OPENAI_BATCH
        deciding = _deciding_arguments(spec)
        deciding |= {
            "chat": spec.is_chat,
            "lines": self._is_batch_file,
            "function": functions_version,
        }
        if opening_request is not None:
            deciding["before"] = [opening_request.prompt, opening_request.messages]

        #: Part of the key of each row whose prompt may be truncated.
        self._length_text = f"{_TRUNCATION}={max_model_len}"
        if _TRUNCATION in spec.sampling:
            deciding["length"] = self._length_text

        # Only the outer keys are sorted. Inside a schema or a tool, the order of keys changes the answer.
        deciding["sampling"] = _sorted(given_sampling(spec, seed))
        sorted_json = json.dumps(_sorted(deciding))
        deciding_json = _with_whole_integers(sorted_json)
        packed = deciding_json.encode("utf-8", "surrogatepass")
        #: A hash of what the run asks of all rows. Each value that decides answers is part of it, and so is the
        #: version of the functions that look at answers.
        self.name = blake2b(packed, digest_size=SIZE).hexdigest()

    def key_of(self, row: Row) -> bytes:
        """Return a row's key, which does not cover the model.

        The key covers the row's pictures, because the prompt's text holds a hash of each picture.
        """
        texts = [row.prompt, row.sampling, row.values]
        if self._pinned:
            texts += self._adapters_of(row)
        # A prompt with pictures is JSON. A row whose prompt is the same text without pictures needs another key.
        if row.pictures:
            texts.append("pictures")
        may_truncate = _TRUNCATION in row.sampling
        # A line of a batch file has its sampling values in the prompt's text.
        if self._is_batch_file and _TRUNCATION in row.prompt:
            may_truncate = True
        if may_truncate:
            texts.append(self._length_text)
        digest = blake2b(digest_size=SIZE, key=self.name.encode())
        for text in texts:
            encoded = text.encode("utf-8", "surrogatepass")
            # The length keeps the end of a text apart from the beginning of the next text.
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
        return digest.digest()

    def _adapters_of(self, row: Row) -> list[str]:
        """Return the pinned texts of the adapters that may answer a row.

        The adapter that a row names takes the place of the run's adapter. A row with several prompts may need both
        adapters, because each prompt may name one.
        """
        names = set(names_in_row(row, self._spec))
        if not names or self._spec.steps:
            names |= self._adapters_of_run
        return sorted(self._pinned[name] for name in names if name in self._pinned)


def _deciding_arguments(spec: RunSpec) -> dict[str, Any]:
    """Return a run's arguments that decide its answers, by name."""
    left_out = _NOT_DECIDING
    if not spec.prompts:
        left_out |= _LATER_PROMPT_ARGUMENTS
    deciding = {}
    for name, value in spec.to_json().items():
        if name not in left_out:
            deciding[name] = value
    return deciding


def _with_whole_integers(text: str) -> str:
    """Return JSON in which whole floats are integers, because 0 and 0.0 are the same value."""
    return json.dumps(json.loads(text, parse_float=_number))


def _sorted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with its keys in order."""
    return dict(sorted(values.items()))


def given_sampling(spec: RunSpec, seed: int | None) -> dict[str, Any]:
    """Return the sampling values that a run was given, and its seed if it was given one. seed: Plan.given_seed."""
    sampling = dict(spec.sampling)
    if seed is not None:
        sampling["seed"] = seed
    return sampling


def differences(old: Plan, new: Plan, *, any_model: bool) -> list[str]:
    """Return a text for each difference in what two runs ask.

    any_model: True if answers of any model are taken, so that another model is no difference.
    """
    lines = []
    new_fingerprints = {new.model.fingerprint}
    if new.second is not None:  # a cascade takes answers of both its models
        new_fingerprints.add(new.second.fingerprint)
    if not any_model and old.model.fingerprint not in new_fingerprints:
        lines.append(f"model {old.model} there, {new.model} here")
    if old.model.adapters != new.model.adapters:
        old_shown = _adapters_only_in(old.model, new.model)
        new_shown = _adapters_only_in(new.model, old.model)
        lines.append(f"adapters {old_shown} there, {new_shown} here")
    old_length = old.model.max_model_len
    new_length = new.model.max_model_len
    if old_length != new_length:
        lines.append(f"max_model_len {old_length} there, {new_length} here")

    old_values = _values_of(old)
    new_values = _values_of(new)
    for name in sorted(old_values.keys() | new_values.keys()):
        old_value = old_values.get(name)
        new_value = new_values.get(name)
        if old_value != new_value:
            lines.append(f"{name} {_shown(old_value)} there, {_shown(new_value)} here")
    return lines


def _adapters_only_in(model: PinnedModel, other: PinnedModel) -> str:
    """Return the names of the adapters that `model` has and `other` lacks, as errors show them."""
    adapters = [adapter for adapter in model.adapters if adapter not in other.adapters]
    if not adapters:
        return "none"
    names = ", ".join(map(shown_adapter, adapters[:_MAX_ADAPTERS_SHOWN]))
    num_more = len(adapters) - _MAX_ADAPTERS_SHOWN
    return names if num_more <= 0 else f"{names} and {num_more} more"


def _values_of(plan: Plan) -> dict[str, Any]:
    """Return the arguments and sampling values that decide what a plan asks."""
    arguments = plan.spec.to_json()
    for name in (*_FILE_ARGUMENTS, "sampling"):
        arguments.pop(name, None)
    return {**arguments, **given_sampling(plan.spec, plan.given_seed)}


def _shown(value: Any) -> str:
    """Return an argument's value as an error message shows it."""
    return "not given" if value is None else brief(value)


def row_keys(key_of: Callable[[Row], bytes], rows: Iterable[Row | object]) -> Keys:
    """Return each row's key, which does not cover the model.

    An entry of `rows` that is no Row stands for a row that could not be read. Its key is all zeros.
    """
    no_key = bytes(SIZE)
    keys = [key_of(row) if isinstance(row, Row) else no_key for row in rows]
    return as_keys(b"".join(keys)).copy()  # unlike the bytes, the copy may be written to


def model_mark(model: PinnedModel) -> Keys:
    """Return a model's mark, which is a hash of its identity, as an array of shape [1, 2].

    `whole_keys` joins the mark to the keys of the rows that the model answers.
    """
    digest = blake2b(model.identity.encode(), digest_size=SIZE, person=b"model").digest()
    return as_keys(digest)


def whole_keys(keys: Keys, marks: Keys) -> Keys:
    """Join the keys of rows with the marks of the models that answer the rows.

    Rows whose joined keys are equal have equal answers.
    keys: the rows' keys without a model. marks: one model's mark for all rows, or one mark for each row. A row that
    asks nothing has a key of zeros, which stays as it is.
    """
    asks_something = keys.any(axis=1, keepdims=True)
    joined_keys = keys ^ marks
    return np.where(asks_something, joined_keys, np.uint64(0))


def as_keys(packed: bytes | bytearray) -> Keys:
    """Return an array of the keys that these bytes hold. Each key becomes two numbers of 64 bits."""
    return np.frombuffer(packed, "<u8").reshape(-1, 2)


def _number(text: str) -> float | int:
    """Return a number, as an int if it is whole."""
    value = float(text)
    return int(value) if value.is_integer() else value
