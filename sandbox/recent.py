"""A bounded memory of texts, for what a child and its worker know of each other."""

from collections import OrderedDict
from typing import Generic, TypeVar

#: Texts that are remembered at most, and characters of all of them together.
MAX_TEXTS, MAX_CHARS = 64, 2 << 20

V = TypeVar("V")


class Recent(Generic[V]):
    """Keeps the values that were used last, by their texts.

    Two that are used for the same texts in the same order keep the same ones. The last text is kept, however long.
    """

    def __init__(self) -> None:
        self._values: OrderedDict[str, V] = OrderedDict()
        self.num_chars = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, text: str) -> V | None:
        if text not in self._values:
            return None
        self._values.move_to_end(text)
        return self._values[text]

    def put(self, text: str, value: V) -> bool:
        """Remember a value; return whether others were forgotten for it."""
        if text not in self._values:
            self.num_chars += len(text)
        self._values[text] = value
        self._values.move_to_end(text)
        has_forgotten = False
        while len(self._values) > MAX_TEXTS or (self.num_chars > MAX_CHARS and len(self._values) > 1):
            oldest, _ = self._values.popitem(last=False)
            self.num_chars -= len(oldest)
            has_forgotten = True
        return has_forgotten
