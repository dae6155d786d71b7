"""A bounded memory by text, which a child and its worker keep alike."""

from collections import OrderedDict
from typing import Generic, TypeVar

#: The most texts that are remembered, and the most characters of all together.
MAX_TEXTS, MAX_CHARS = 64, 2 << 20

V = TypeVar("V")


class Recent(Generic[V]):
    """Keeps the values that were used last, by their texts.

    If two memories see the same texts in the same order, they keep the same ones. The last text always stays.
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
        """Remember a value. Return whether others were forgotten to make room."""
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
