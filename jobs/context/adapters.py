"""Pins LoRA adapters to their files.

A pinned adapter is a text: the adapter's name with a hash of its files. The engine computes with exactly these files,
or refuses the request. The keys of answers, of journals and of the engine's cache contain the pinned text.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from jobs.errors import InvalidJob, UnknownAdapter

#: The sampling value that names an adapter.
ADAPTER = "adapter"
#: The most names that an error lists.
MAX_LISTED = 20
#: Stands for the hash of an adapter's files if the adapter was not there when its run was planned. The engine has the
#: same value as NO_FILES.
_NO_FILES = "0" * 32


def name_of(pinned: str) -> str:
    """Return the name of a pinned adapter."""
    name, _, _ = pinned.rpartition("@")
    return name


def digest_of(pinned: str) -> str:
    """Return the hash of a pinned adapter's files."""
    _, _, digest = pinned.rpartition("@")
    return digest


def shown_adapter(pinned: str) -> str:
    """Return a pinned adapter as messages show it, with the beginning of its hash."""
    return f"{name_of(pinned)} ({digest_of(pinned)[:8]})"


def _by_name(pinned: Iterable[str]) -> dict[str, str]:
    """Return pinned adapters by their names."""
    return {name_of(adapter): adapter for adapter in pinned}


def _names_text(names: Sequence[str]) -> str:
    """Return names as an error lists them."""
    text = ", ".join(names[:MAX_LISTED])
    num_more = len(names) - MAX_LISTED
    return text if num_more <= 0 else f"{text} and {num_more} more"


class Adapters:
    """A set of adapters, each pinned to its files. is_live: whether `refresh` may change the set."""

    is_live: ClassVar[bool] = False

    def __init__(self, pinned: Iterable[str] = ()) -> None:
        self._by_name = _by_name(pinned)

    def refresh(self) -> None:
        """Look for adapters again if `is_live` is true. This may take long, because new adapters are read."""

    @property
    def pinned(self) -> Sequence[str]:
        """Return all adapters as pinned texts, sorted."""
        return sorted(self._by_name.values())

    @property
    def names(self) -> Sequence[str]:
        """Return all texts by which a job may name an adapter: the adapters' names, and their pinned texts."""
        return [*sorted(self._by_name), *self.pinned]

    def pin(self, name: str) -> str:
        """Return an adapter's pinned text: its name with a hash of its files. Raises UnknownAdapter.

        name: the adapter's name, or its pinned text.
        """
        by_name = self._by_name  # one value for the whole call, because `refresh` may replace it
        if name in by_name:
            return by_name[name]
        pinned_text = by_name.get(name_of(name))
        if pinned_text == name:
            return name
        names = _names_text(sorted(by_name)) or "none"
        raise UnknownAdapter(name, names)

    @property
    def names_text(self) -> str:
        """Return the adapters' names as an error lists them; "" if there are no adapters."""
        return _names_text(sorted(self._by_name))

    def pinned_values(self, sampling: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return sampling values with the adapter's name replaced by its pinned text. Raises UnknownAdapter."""
        name = sampling.get(ADAPTER)
        if name is None:
            return sampling
        return {**sampling, ADAPTER: self.pin(name)}


class LiveAdapters(Adapters):
    """The adapters that this process could use when `refresh` was last called. Thread-safe.

    find: returns the pinned adapters that can be used, and a mapping from each other adapter's name to its problem.
    """

    is_live = True

    def __init__(self, find: Callable[[], tuple[Iterable[str], Mapping[str, str]]]) -> None:
        super().__init__()
        self._find = find
        self._problems: Mapping[str, str] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look for adapters again."""
        pinned, self._problems = self._find()
        self._by_name = _by_name(pinned)

    def pin(self, name: str) -> str:
        """Return an adapter's pinned text. Raises UnknownAdapter, or InvalidJob if its files cannot be used."""
        if name in self._problems:
            raise InvalidJob(self._problems[name])
        return super().pin(name)


class PlannedAdapters(Adapters):
    """The adapters that a run has pinned. The engine refuses rows that name another adapter."""

    def pin(self, name: str) -> str:
        """Return an adapter's pinned text. name: the adapter's name or its pinned text."""
        try:
            return super().pin(name)
        except UnknownAdapter:
            # No adapter has the digest _NO_FILES, so the engine refuses the row.
            return f"{name}@{_NO_FILES}"
