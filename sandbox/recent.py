"""Recent: a bounded memory by text. A child and its worker have one each, and both keep the same texts."""

from collections import OrderedDict
from typing import Generic, TypeVar

#: The most texts that are remembered.
MAX_TEXTS = 64

#: The most characters of all of them together.
MAX_CHARS = 2 << 20

V = TypeVar("V")


class Recent(Generic[V]):
    """Keeps the values that were used last, by their texts.

    Two memories that see the same texts in the same order keep the same texts. The last text always stays.
    """

    def __init__(self) -> None:
        self._values: OrderedDict[str, V] = OrderedDict()
        self.num_chars = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, text: str) -> V | None:
        """Return a text's value, and note that it was used; None if the text is not remembered."""
        if text not in self._values:
            return None
        self._values.move_to_end(text)
        return self._values[text]

    def put(self, text: str, value: V) -> bool:
        """Remember a value. Returns whether other values were forgotten to make room."""
        if text not in self._values:
            self.num_chars += len(text)
        self._values[text] = value
        self._values.move_to_end(text)
        has_forgotten = False
        while len(self._values) > MAX_TEXTS or (
            self.num_chars > MAX_CHARS and len(self._values) > 1
        ):
            oldest, _ = self._values.popitem(last=False)
            self.num_chars -= len(oldest)
            has_forgotten = True
        return has_forgotten
