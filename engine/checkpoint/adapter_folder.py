"""AdapterFolder: the adapters in a folder of PEFT checkpoints, found by name. Loads no torch."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

from engine.checkpoint.fingerprint import check_file
from engine.checkpoint.model_config import read_json
from engine.errors import AdapterGone, AdapterRefused, ConfigError, MissingWeights, UnknownAdapter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
#: The most names that an error lists.
MAX_LISTED = 20
#: A scale that is larger comes of a mistake.
LARGEST_ALPHA = 1_000_000
#: How safetensors' names of floating-point types begin.
FLOATING_POINT = ("F", "BF")
#: Characters of a wrong value in an error.
MAX_SHOWN = 40
#: A name with the fingerprint that its files must have.
PINNED = re.compile(r"(.+)@([0-9a-f]{32})")
#: The fingerprint of an adapter that was not there when it was looked for. No files have it.
NO_FILES = "0" * 32

#: Keys of adapter_config.json that change no answer, or that `scale_of` reads. Any other one must be off.
KNOWN_KEYS = frozenset(
    {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "peft_type", "bias"}
    | {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
    | {"base_model_name_or_path", "revision", "auto_mapping", "task_type", "peft_version"}
    | {"inference_mode", "lora_dropout", "init_lora_weights", "runtime_config"}
    | {"eva_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"}
)
#: Ways to begin a training that leave the model's own weights as they are.
PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """An adapter as its files were when they were read. fingerprint: a hash of both files, 32 hexadecimal digits."""

    name: str
    fingerprint: str
    folder: Path

    @property
    def pinned(self) -> str:
        """Return the name with the fingerprint, which is valid only while the files stay the same."""
        return f"{self.name}@{self.fingerprint}"


class AdapterFolder:
    """Finds adapters by name, in sub-folders that hold a configuration and weights. Any thread may call it.

    An adapter is read again if the size or time of a file changes. A new sub-folder is found at once.
    """

    def __init__(self, folder: str | None) -> None:
        """Raise ConfigError if the folder is not there.

        folder: its sub-folders are the adapters; None serves no adapters.
        """
        self._folder = None if folder is None else Path(folder).expanduser()
        if self._folder is not None and not self._folder.is_dir():
            raise ConfigError(
                f"adapters={folder!r} is no folder; name one whose sub-folders are PEFT checkpoints"
            )
        self._known: dict[str, tuple[object, Adapter]] = {}  # by name, with the files' state

    def names(self) -> list[str]:
        """Return the names of all adapters, sorted."""
        if self._folder is None:
            return []
        names = (path.parent.name for path in self._folder.glob(f"*/{CONFIG}"))
        return sorted(name for name in names if _can_be_asked_for(name))

    def find(self, requested: str) -> Adapter:
        """Return the adapter of a name, or of a name pinned to a fingerprint.

        Raises UnknownAdapter if there is none, AdapterRefused if its files are not usable, and AdapterGone if the name
        is pinned and the folder no longer holds the files with this fingerprint.
        """
        match = PINNED.fullmatch(requested)
        if match is not None:
            return self._find_pinned(*match.groups())
        adapter = self._read(requested)
        if adapter is None:
            raise UnknownAdapter(f"there is no adapter {requested!r}; {self._listed()}")
        return adapter

    def _find_pinned(self, name: str, fingerprint: str) -> Adapter:
        """Return the adapter of a name, if its files have this fingerprint. Raises UnknownAdapter or AdapterGone."""
        if fingerprint == NO_FILES:
            raise UnknownAdapter(
                f"there was no adapter {name!r} when it was looked for; {self._listed()}"
            )
        try:
            adapter = self._read(name)
        except AdapterRefused:
            # The files that are there now cannot be used, so they are not the pinned ones.
            adapter = None
        if adapter is not None and adapter.fingerprint == fingerprint:
            return adapter
        present = "none" if adapter is None else adapter.fingerprint[:8]
        raise AdapterGone(
            f"the files of adapter {name!r} have changed: {fingerprint[:8]} is asked for, and {present} is there; "
            "ask again, or put the old files back"
        )

    def look(self) -> tuple[list[Adapter], dict[str, str]]:
        """Return all usable adapters, and the problem of each other adapter by its name."""
        adapters: list[Adapter] = []
        problems: dict[str, str] = {}
        for name in self.names():
            try:
                adapter = self._read(name)
            except AdapterRefused as error:
                problems[name] = str(error)
                continue
            if adapter is not None:
                adapters.append(adapter)
        return adapters, problems

    def largest(self) -> int:
        """Return how many numbers the largest adapter has. Adapters that cannot be used are left out."""
        sizes = [0]
        for name in self.names():
            assert self._folder is not None
            with suppress(AdapterRefused, MissingWeights, OSError, ValueError):
                check_files(name, self._folder / name)
                entries = check_file(self._folder / name / WEIGHTS)
                sizes.append(sum(prod(entry.shape) for entry in entries))
        return max(sizes)

    def _listed(self) -> str:
        if self._folder is None:
            return "this model is served without adapters"
        names = self.names()
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        return f"known are {', '.join(names[:MAX_LISTED])}{more}" if names else "there are none yet"

    def _read(self, name: str) -> Adapter | None:
        """Return the adapter in a sub-folder; None if the folder has no configuration of an adapter."""
        if self._folder is None or not _can_be_asked_for(name):
            return None
        folder = self._folder / name
        try:
            state = [_state(folder / file) for file in (CONFIG, WEIGHTS)]
        except FileNotFoundError as error:
            if not (folder / CONFIG).exists():
                return None
            raise AdapterRefused(name, f"it has no {WEIGHTS}; copy it there") from error
        except (OSError, ValueError):
            return None
        known = self._known.get(name)
        if known is not None and known[0] == state:
            return known[1]
        check_files(name, folder)
        adapter = Adapter(name, _fingerprint(name, folder), folder)
        self._known[name] = state, adapter
        return adapter


def _can_be_asked_for(name: str) -> bool:
    """Whether this may be an adapter's name: the name of a visible folder, printable, and not in the pinned form."""
    is_folder_name = bool(name) and not name.startswith(".") and Path(name).name == name
    return is_folder_name and name.isprintable() and PINNED.fullmatch(name) is None


def _state(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _fingerprint(name: str, folder: Path) -> str:
    """Hash both files. Raises AdapterRefused if one cannot be read."""
    digest = blake2b(digest_size=16)
    try:
        for file in (CONFIG, WEIGHTS):
            digest.update((folder / file).stat().st_size.to_bytes(8, "little"))
            with (folder / file).open("rb") as opened:
                while part := opened.read(1 << 20):
                    digest.update(part)
    except OSError as error:
        raise AdapterRefused(name, f"its files cannot be read ({error})") from error
    return digest.hexdigest()


def check_files(name: str, folder: Path) -> None:
    """Raise AdapterRefused unless the configuration asks for plain LoRA, and the weights' file is whole."""
    try:
        values = read_json(folder / CONFIG)
        entries = check_file(folder / WEIGHTS)
    except ConfigError as error:
        raise AdapterRefused(name, str(error)) from error
    problem = _problem(values)
    if problem is not None:
        raise AdapterRefused(name, problem)
    for entry in entries:
        if not entry.name.endswith((".lora_A.weight", ".lora_B.weight")):
            raise AdapterRefused(
                name,
                f"{WEIGHTS} holds {entry.name!r}, and only lora_A and lora_B of linear layers are read",
            )
        if not entry.dtype.startswith(FLOATING_POINT):
            raise AdapterRefused(
                name,
                f"{entry.name!r} in {WEIGHTS} is of type {entry.dtype}, expected floating-point numbers",
            )


def _problem(values: Mapping[str, Any]) -> str | None:
    """Say what a configuration asks for that is not built; None if all of it is built."""
    kind = values.get("peft_type")
    if kind != "LORA":
        return f"peft_type is {kind!r}, and only 'LORA' is built"
    if values.get("bias", "none") != "none":
        return f"bias is {values['bias']!r}, and only 'none' is built"
    beginning = values.get("init_lora_weights")
    if beginning not in PLAIN_BEGINNINGS:
        return (
            f"init_lora_weights is {beginning!r}, which changes the model's own weights; save it again with "
            "path_initial_model_for_weight_conversion"
        )
    for name, value in values.items():
        if name not in KNOWN_KEYS and value:
            return (
                f"{name} is set, which is not built: train without it, or merge it into the model"
            )
    patterns = values.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        return f"alpha_pattern must be an object, found {type(patterns).__name__}"
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            return f"alpha_pattern has {pattern!r}, which is no pattern ({error})"
    for alpha in (values.get("lora_alpha"), *patterns.values()):
        is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
        if not is_number or not abs(alpha) <= LARGEST_ALPHA:
            return (
                f"lora_alpha must be a number up to {LARGEST_ALPHA:,}, got {str(alpha)[:MAX_SHOWN]}"
            )
    return None


def scale_of(values: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor by which an adapter's change of a module is multiplied.

    values: adapter_config.json. rank: the number of rows of lora_A.
    """
    alpha: float = values["lora_alpha"]
    for pattern, value in (values.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):  # as in PEFT
            alpha = value
            break
    return alpha / (rank**0.5 if values.get("use_rslora") else rank)
