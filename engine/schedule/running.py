"""RunningList: the sequences that hold slot and blocks, the most urgent first."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.schedule.sequences.sequence import Sequence


@dataclass(frozen=True)
class SlotGroup:
    """Some running sequences, in order.

    seqs: not to be changed.  slots: [seqs] int64, the slot of each.
    """

    seqs: list[Sequence]
    slots: NDArray[np.int64]

    def select(self, wanted: NDArray[np.bool_]) -> SlotGroup:
        """Return the members that `wanted`, [seqs] bool, names."""
        if wanted.all():
            return self
        return SlotGroup([self.seqs[i] for i in np.flatnonzero(wanted).tolist()], self.slots[wanted])


class RunningList:
    """Running sequences by (lane, arrival): the last one is the first to be preempted.

    From one step to the next it seldom changes: what is asked of all of a lane is kept until it does.
    """

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []
        self._lanes: dict[int, SlotGroup] | None = {}  # None: not known since a change

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    @property
    def last(self) -> Sequence:
        """The least urgent."""
        return self._seqs[-1]

    @property
    def lanes(self) -> dict[int, SlotGroup]:
        """All of them by lane, the most urgent lane first."""
        if self._lanes is None:
            by_lane: dict[int, list[Sequence]] = {}
            for seq in self._seqs:
                by_lane.setdefault(seq.lane, []).append(seq)
            self._lanes = {
                lane: SlotGroup(seqs, np.array([seq.slot for seq in seqs], np.int64))
                for lane, seqs in by_lane.items()
            }
        return self._lanes

    def add(self, seq: Sequence) -> None:
        """Put a sequence that has its slot in its place."""
        insort(self._seqs, seq, key=_urgency)
        self._lanes = None

    def remove(self, gone: Iterable[Sequence]) -> None:
        """Take out some of them; all must be there."""
        for seq in gone:
            self._seqs.remove(seq)
        self._lanes = None

    def pop(self) -> Sequence:
        """Take out the least urgent."""
        self._lanes = None
        return self._seqs.pop()

    def clear(self) -> None:
        """Take out all."""
        self._seqs, self._lanes = [], {}

    def move(self, seq: Sequence, lane: int) -> None:
        """Move one of them to another lane."""
        self._seqs.remove(seq)
        seq.lane = lane
        self.add(seq)


def _urgency(seq: Sequence) -> tuple[int, int]:
    return seq.lane, seq.arrival
