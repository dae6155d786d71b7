"""WorkerSettings: the operator's settings, read once from `TOKENMILL_` variables and `.env` when work starts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dotenv import dotenv_values
from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from jobs.common.plain_log import AUTO, checked_format
from jobs.context import MAX_RESULT_BYTES, JobContext
from jobs.context.adapters import Adapters, LiveAdapters
from jobs.context.answers import DEFAULT_BYTES, AnswerMemo
from jobs.context.checks import DEFAULT_LIMIT_S, Checks
from jobs.context.served_model import PromptMeter, ServedModel
from jobs.context.shared_files import DEFAULT_BYTES as SHARD_BYTES
from jobs.context.shared_files import ShardBytes, SharedFiles
from jobs.errors import JobsError
from jobs.installed import check_sampling
from jobs.prompts.arguments import MAX_MODEL_CHARS
from jobs.runs.plans.paths import STORES, is_stored, run_path
from jobs.table import ALLOWED_FUNCTIONS
from worker.errors import SettingsError
from worker.store.records.job_record import DEFAULT_MAX_HELD_BYTES, DEFAULT_MAX_JOB_BYTES
from worker.threads.interrupts import check_interrupted, current_call

if TYPE_CHECKING:
    from redis import Redis

    from engine import EngineConfig, ModelIdentity

_PREFIX = "TOKENMILL_"
_ENV_FILE = ".env"
_LISTS = frozenset({"data_roots", "allowed_functions", "allowed_webhook_hosts"})
_PORTS = re.compile(r"(?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?", re.ASCII)
_OUR_PACKAGES = frozenset({"engine", "jobs", "worker"})


class WorkerSettings(BaseSettings):
    """The settings of a worker process. `load()` reads them.

    Every field is read from `TOKENMILL_<NAME>`. The fields from `model` to `deterministic` have the meanings and the
    defaults of the fields of `engine.EngineConfig`. Sizes in bytes may have a unit, such as 4GiB or 512MB.
    """

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_file=_ENV_FILE, extra="ignore", frozen=True, protected_namespaces=()
    )

    model: str = Field(min_length=1)
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    kv_cache_bytes: ByteSize | None = None
    kv_cache_dtype: str = "auto"
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    attention_backend: str = "auto"
    model_path: str = "auto"
    quantization: str | None = None
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    seed: int = 0
    chat_template: str | None = None
    pooling: str | None = None
    adapters: str | None = None
    max_adapters: int = 16
    kernel_check: str = "warn"
    deterministic: bool = False

    served_name: str | None = Field(default=None, min_length=1, max_length=MAX_MODEL_CHARS)
    """The name of the model in answers. Jobs may ask for the model by this name, and by the model's own names."""

    data_roots: Annotated[tuple[str, ...], NoDecode] = Field(default_factory=lambda: (os.getcwd(),))
    """Folders and prefixes of object stores (s3://bucket/prefix), split at ':'. Jobs read and write files only below
    them."""

    allowed_functions: Annotated[tuple[str, ...], NoDecode] = ()
    """Exact dotted names of functions that jobs and callbacks may call beside Tokenmill's own; split at ','."""

    allowed_webhook_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Hosts that webhooks may call, split at ','. A name must resolve to public or to listed addresses."""

    max_job_bytes: ByteSize = Field(default=ByteSize(DEFAULT_MAX_JOB_BYTES), ge=1 << 10)
    """The most bytes of a job's unpacked payload. The payload may hold one list or object for each 40 bytes of this
    limit. A job with more is failed without being read."""

    max_held_bytes: ByteSize = Field(default=ByteSize(DEFAULT_MAX_HELD_BYTES), ge=1 << 10)
    """The most bytes of Redis hashes and unpacked payloads that a lane's open jobs may hold. Further jobs wait."""

    max_result_bytes: ByteSize = Field(default=ByteSize(MAX_RESULT_BYTES), ge=1 << 10)
    """The most bytes of a job's value as JSON. A job with a larger value fails."""

    answer_memo_bytes: ByteSize = Field(default=ByteSize(DEFAULT_BYTES), ge=0)
    """Memory for answers to greedy rows, so that equal rows of a run are computed once; 0 keeps no answers."""

    max_shard_bytes: ByteSize = Field(default=ByteSize(SHARD_BYTES), ge=1 << 24)
    """The most memory for a shard's prompts, and for the pages that are decoded at a time. A shard that needs more
    fails. While the open shards together need this much, no further shard is opened."""

    max_worker_deaths: int = Field(default=5, ge=1)
    """When this many workers have died with a job, the job is failed."""

    lease_s: int | None = Field(default=None, ge=2)
    """Seconds without a sign of life after which a worker's jobs are queued again. The default is
    `--job-monitoring-interval` + 45. So a dead worker's jobs are back in their queues within the interval + 60."""

    prefetch: int = Field(default=32, ge=0)
    """Sequences claimed beyond what the engine can run at once, so that a slot never waits for Redis."""

    function_threads: int = Field(default=4, ge=1)
    """Users' functions and callbacks that run at the same time."""

    function_grace_s: float = Field(default=5, ge=0)
    """Seconds that a function or callback may go on after its timeout, or after it was stopped. Then its thread is
    given up, and another one takes its place."""

    file_timeout_s: float = Field(default=300, gt=0)
    """Seconds without a sign of progress after which opening a shard, writing a part or planning a run fails its job.
    Its thread is given up `function_grace_s` later."""

    check_timeout_s: float = Field(default=DEFAULT_LIMIT_S, gt=0)
    """Seconds that a check of one answer may take. After that the answer counts as not valid."""

    drain_s: float | None = Field(default=None, ge=0)
    """Seconds from the first signal to stop until the jobs that still run are given back. By default they finish."""

    journal_s: float = Field(default=10, ge=0)
    """Seconds between two entries in the journal of an open shard or a long job. The next worker continues the work
    from the journal. An entry is also written when the worker must stop. 0 turns journals off."""

    max_stuck_threads: int = Field(default=16, ge=0)
    """The most threads that were given up and still run. With more, the worker gives back its jobs and exits."""

    metrics_port: Annotated[range, NoDecode] = range(0)
    """The port of /metrics, /livez and /readyz; 0 turns them off. From a range such as 9464-9471 the first free port is
    taken, so that several workers on a machine can have the same settings."""

    metrics_host: str = "127.0.0.1"
    """The address on which /metrics, /livez and /readyz are served."""

    traces: Literal["off", "producers", "all"] = "off"
    """The jobs that are traced with OpenTelemetry: none, those whose meta has a trace context, or all."""

    log_format: Annotated[str, AfterValidator(checked_format)] = AUTO
    """The form of the log: text, json, or auto, which is text on a terminal and JSON elsewhere."""

    torch_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine. By default torch chooses, and the engine uses fewer while other programs are busy."""

    @field_validator("*", mode="before")
    @classmethod
    def _not_empty(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a variable that is set to nothing. Only a list may be empty."""
        if value == "" and info.field_name not in _LISTS:
            raise ValueError("it is empty: give it a value, or unset it")
        return value

    @field_validator("data_roots", mode="before")
    @classmethod
    def _split_roots(cls, value: Any) -> Any:
        """Split a text into data roots, and return each root's real path or prefix."""
        parts = split_roots(value) if isinstance(value, str) else value
        return tuple(_root(part) for part in parts if part)

    @field_validator("data_roots")
    @classmethod
    def _roots_exist(cls, roots: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse data roots that are not there."""
        if not roots:
            raise ValueError(
                "names no folder: list at least one, or unset it for the working directory"
            )
        for root in roots:
            if not is_stored(root) and not os.path.isdir(root):
                raise ValueError(f"{root!r} is not a folder: create it, or leave it out")
        return roots

    @field_validator("metrics_port", mode="before")
    @classmethod
    def _ports(cls, value: Any) -> Any:
        """Read a port, or a range of ports."""
        if not isinstance(value, str):
            return value
        match = _PORTS.fullmatch(value.strip())
        if match is not None:
            first = int(match["first"])
            last = int(match["last"] or match["first"])
            if first == 0 and last == 0:
                return range(0)
            if 0 < first <= last <= 65_535:
                return range(first, last + 1)
        raise ValueError(
            "expected a port from 1 to 65535, a range of ports such as 9100-9107, or 0 for none"
        )

    @field_validator("allowed_functions", "allowed_webhook_hosts", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        """Split a text at its commas."""
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(part.strip() for part in parts if part.strip())

    @field_validator("allowed_functions")
    @classmethod
    def _functions_of_users(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse names without a module, and names in Tokenmill's own packages."""
        for name in names:
            if "." not in name.strip("."):
                raise ValueError(f"{name!r} names no function in a module: write module.function")
            package = name.partition(".")[0]
            if package in _OUR_PACKAGES and name not in ALLOWED_FUNCTIONS:
                raise ValueError(
                    f"{name!r} would be looked up in the package {package!r}, which is Tokenmill's own here: "
                    "give the module of your function another name"
                )
        return names

    @classmethod
    def load(cls) -> WorkerSettings:
        """Read the environment and `.env`. Raises SettingsError, whose message names each bad or unknown variable."""
        try:
            _check_names([*os.environ, *dotenv_values(_ENV_FILE)])
            return cls()  # type: ignore[call-arg]  # pydantic-settings fills `model` from the environment
        except ValidationError as error:
            raise SettingsError(_explain(error)) from error
        except (UnicodeDecodeError, OSError) as error:
            raise SettingsError(
                f".env cannot be read ({error}): write it in UTF-8, or remove it"
            ) from error

    @property
    def model_name(self) -> str:
        """The model's name in responses and manifests: `served_name`, else the folder's name, else the hub id."""
        if self.served_name is not None:
            return self.served_name
        folder_names = _folder_names(self.model)
        return folder_names[0] if folder_names else self.model

    def served_model(
        self, identity: ModelIdentity, attention_backend: str = "", max_model_len: int = 0
    ) -> ServedModel:
        """Return the served model as jobs see it. max_model_len: the engine's limit in tokens; 0 if it is not known."""
        return ServedModel(
            name=self.model_name,
            fingerprint=identity.fingerprint,
            dtype=identity.dtype,
            max_model_len=max_model_len,
            attention_backend=attention_backend,
            aliases=(self.model, *_folder_names(self.model)),
            embedding_size=identity.embedding_size,
            embedding_prompts=identity.embedding_prompts,
            classes=identity.classes,
            control_tokens=identity.control_tokens,
            reads_pictures=identity.reads_pictures,
            generates=identity.generates,
            clock_formats=identity.clock_formats,
        )

    def job_context(
        self, connection: Redis, model: ServedModel, meter: Callable[[], PromptMeter]
    ) -> JobContext:
        """Return the context that all jobs of this process share, without the values that differ from job to job."""
        # The import loads Arrow, which only a worker needs.
        from jobs.parquet.prompts.picture_source import picture_reader

        return JobContext(
            connection,
            queue_name="",
            job_id="",
            execution_id="",
            data_roots=self.data_roots,
            model=model,
            check_sampling=check_sampling,
            files=SharedFiles(current_call),
            answers=AnswerMemo(self.answer_memo_bytes),
            shard_bytes=ShardBytes(self.max_shard_bytes),
            check_interrupted=check_interrupted,
            max_result_bytes=self.max_result_bytes,
            file_timeout_s=self.file_timeout_s,
            picture_reader=picture_reader,
            meter=meter,
            checks=Checks(self.allowed_functions, self.check_timeout_s),
            webhook_hosts=frozenset(self.allowed_webhook_hosts),
            allowed_functions=frozenset(self.allowed_functions),
            adapters=self._adapters(),
        )

    def _adapters(self) -> Adapters:
        """Return the adapters that jobs may name."""
        from engine import AdapterFolder

        if self.adapters is None:
            return Adapters()
        folder = AdapterFolder(self.adapters)

        def read_folder() -> tuple[list[str], dict[str, str]]:
            """Return the pinned names of the usable adapters, and the problems of all other adapters by name."""
            adapters, problem_of = folder.look()
            return [adapter.pinned for adapter in adapters], problem_of

        return LiveAdapters(read_folder)

    def engine_config(self) -> EngineConfig:
        """Return the engine's part of the settings. Raises engine.ConfigError for a bad combination."""
        from engine import EngineConfig

        engine_fields = {field.name for field in fields(EngineConfig)}
        shared_fields = engine_fields & set(WorkerSettings.model_fields)
        values = {name: getattr(self, name) for name in shared_fields}
        has_fixed_threads = self.torch_threads is not None or "OMP_NUM_THREADS" in os.environ
        adapts_threads = not has_fixed_threads and not self.deterministic
        return EngineConfig(**values, adapt_cpu_threads=adapts_threads)


def _folder_names(model: str) -> tuple[str, ...]:
    """Return the name and the real path of a checkpoint's folder; nothing for a hub id."""
    if not os.path.isdir(model):
        return ()
    path = os.path.realpath(model)
    return os.path.basename(path), path


def _root(part: str) -> str:
    """Return a root's real path, or a store's prefix in its usual form. Raises ValueError for a bad prefix."""
    path = os.path.expanduser(part)
    if not is_stored(path.lower()):  # a store may be given in capitals, such as S3://
        return os.path.realpath(path)
    try:
        return run_path(path)
    except JobsError as error:
        raise ValueError(str(error)) from None


def _name_pattern(name: str) -> str:
    """Return a pattern that finds a setting's name in a message.

    A name of one word, such as `seed`, may mean something else. So it counts only beside words that make it a setting.
    """
    if "_" in name:
        return name
    # As in "model=", "dtype must be" and "leave device out".
    name_before_word = rf"{name}(?==| must\b| out\b)"
    # As in "set seed" and "another model".
    name_after_word = rf"(?<=\bset ){name}|(?<=\banother ){name}"
    return f"{name_before_word}|{name_after_word}"


_ANY_NAME = "|".join(_name_pattern(name) for name in WorkerSettings.model_fields)

#: Finds a setting's name in a message of the engine, but not a key of a checkpoint's file, which follows a colon.
_ENGINE_SETTING = re.compile(rf"(?<!: )\b({_ANY_NAME})\b")


def with_variables(text: str) -> str:
    """Return a message of the engine with each setting's name replaced by the name of its variable."""
    return _ENGINE_SETTING.sub(lambda match: f"{_PREFIX}{match[0].upper()}", text)


def read_variable(name: str) -> str | None:
    """Return a variable's value without checking it; None if it is missing or empty."""
    value = os.environ.get(name)
    if value:
        return value
    try:
        return dotenv_values(_ENV_FILE).get(name)
    except (UnicodeDecodeError, OSError):
        return None  # `load` reports the error


def _check_names(names: Iterable[str]) -> None:
    """Raise SettingsError if some TOKENMILL_ variables, perhaps misspelt, are no settings. The message lists them."""
    known = [_PREFIX + field.upper() for field in WorkerSettings.model_fields]
    prefixed_names = {name.upper() for name in names if name.upper().startswith(_PREFIX)}
    lines = []
    for name in sorted(prefixed_names - set(known)):
        hint = "docs/operator.md lists the settings; unset it"
        similar = get_close_matches(name, known, n=1, cutoff=0.8)
        if similar:
            hint = f"did you mean {similar[0]}?"
        lines.append(f"{name} is no setting: {hint}")
    if lines:
        raise SettingsError("; ".join(lines))


def _explain(error: ValidationError) -> str:
    """Return a message that says what is wrong with each variable."""
    lines = []
    for problem in error.errors():
        field, *_ = problem["loc"]
        name = _PREFIX + str(field).upper()
        if problem["type"] == "missing":
            lines.append(f"{name} is not set: name a model folder or a hub id")
        elif problem["type"].startswith("byte_size"):
            lines.append(
                f"{name}={problem['input']!r}: expected a size such as 4194304, 512MB or 4GiB"
            )
        else:
            lines.append(
                f"{name}={problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}"
            )
    return "; ".join(lines)


def split_roots(text: str) -> list[str]:
    """Split a list of folders and object stores at ':', but not within the '://' of a store."""
    # A colon belongs to a store's address if a store's name comes before it and '//' after it. Any other colon splits.
    any_store = "|".join(STORES)
    colon_without_slashes = r":(?!//)"
    colon_without_store = rf"(?<!\b(?:{any_store})):"
    roots = re.split(f"{colon_without_slashes}|{colon_without_store}", text, flags=re.I)
    return [root for root in roots if root]
