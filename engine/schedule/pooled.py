"""PooledStates: collects one sequence's vector while its hidden states come chunk by chunk."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.heads import Classes

Vector = NDArray[np.float32]


class PooledStates:
    """Collects one sequence's vector. next: the index of the first token that launched steps have still to pool."""

    def __init__(
        self,
        modes: tuple[str, ...],
        num_tokens: int,
        *,
        dimensions: int | None = None,
        normalize: bool = False,
        project: Callable[[Vector], Vector] | None = None,
    ) -> None:
        """modes: as in Pooling.  num_tokens: of the sequence.  dimensions: how many numbers to keep, None for all.

        project: turns the pooled states into the vector that is cut and normalised.
        """
        self._modes = modes
        self._dimensions = dimensions
        self._normalize = normalize
        self._project = project
        self._first = num_tokens - 1 if modes == ("lasttoken",) else 0
        self._end = 1 if modes == ("cls",) else num_tokens
        self.next = self._first
        self._num_rows = 0  # added so far
        self._vectors: NDArray[np.float32] | None = None  # [modes, hidden]

    @property
    def needs_all(self) -> bool:
        """Whether more than the last token's hidden state is needed."""
        return self._modes != ("lasttoken",)

    def until(self, num_tokens: int) -> range:
        """Return the places that become known once num_tokens tokens are computed."""
        return range(self.next, min(num_tokens, self._end))

    def forget(self) -> None:
        """Go back to the last state that was added: the launched steps that have not run will not run."""
        self.next = self._first + self._num_rows

    def add(self, pooled: NDArray[np.float32], num_rows: int) -> None:
        """Add a step's pooled states of the next num_rows tokens. pooled: [modes * hidden], mode after mode."""
        new = pooled.reshape(len(self._modes), -1)
        if self._vectors is None:
            self._vectors = new.copy()
        else:
            for mode, vector, more in zip(self._modes, self._vectors, new, strict=True):
                if mode == "max":
                    np.maximum(vector, more, out=vector)
                elif mode == "lasttoken":
                    vector[:] = more
                elif mode != "cls":
                    vector += more
        self._num_rows += num_rows

    @property
    def is_finite(self) -> bool:
        """Whether all of the model's numbers are finite, once all rows are in."""
        assert self._vectors is not None
        return bool(np.isfinite(self._vectors).all())

    def result(self) -> Any:
        """Return the text's vector of float32 numbers, once all rows are in."""
        return self.vector()

    def vector(self) -> list[float]:
        """Return the pooled vector, projected, cut and normalised as asked for."""
        assert self._vectors is not None
        weights = {
            "mean": self._num_rows,
            "mean_sqrt_len_tokens": self._num_rows**0.5,
            "weightedmean": self._num_rows * (self._num_rows + 1) / 2,
        }
        parts = [
            vector / np.float32(weights.get(mode, 1))
            for mode, vector in zip(self._modes, self._vectors, strict=True)
        ]
        pooled = np.concatenate(parts)
        whole = (pooled if self._project is None else self._project(pooled))[: self._dimensions]
        if self._normalize:  # as torch.nn.functional.normalize does it
            whole = whole / max(np.linalg.norm(whole), np.float32(1e-12))
        numbers: list[float] = whole.tolist()
        return numbers


class ClassStates(PooledStates):
    """Collects the numbers of one text's classes, which come with its last token."""

    def __init__(self, classes: Classes, num_tokens: int, *, of_pair: bool) -> None:
        super().__init__(("lasttoken",), num_tokens)
        self._classes = classes
        self._of_pair = of_pair

    def result(self) -> dict[str, float]:
        """Return each class's probability by label.

        A head of one class gives its plain number instead. For a pair of texts, as from a cross-encoder, that number
        is turned into a probability unless the checkpoint asks for plain numbers.
        """
        numbers = np.array(self.vector(), np.float64)
        has_one_class = len(numbers) == 1
        stays_plain = has_one_class and (not self._of_pair or self._classes.has_plain_relevance)
        if self._classes.is_exclusive and not has_one_class:
            weights = np.exp(numbers - numbers.max())
            numbers = weights / weights.sum()
        elif not stays_plain:
            numbers = 1 / (1 + np.exp(-numbers))
        return dict(zip(self._classes.labels, numbers.tolist(), strict=True))
