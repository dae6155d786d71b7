"""WaitingLanes: the sequences that hold neither slot nor blocks, lane by lane."""

from __future__ import annotations

from collections import deque

from engine.schedule.sequences.sequence import Sequence


class WaitingLanes(dict[int, deque[Sequence]]):
    """The waiting sequences: in each lane the first to arrive is the first to go."""

    @property
    def num_seqs(self) -> int:
        """All of them."""
        return sum(map(len, self.values()))

    def append(self, seq: Sequence) -> None:
        """Put the latest arrival at the end of its lane."""
        self.setdefault(seq.lane, deque()).append(seq)

    def put_back(self, seq: Sequence) -> None:
        """Put a sequence that arrived before into its lane, in order of arrival."""
        queue = self.setdefault(seq.lane, deque())
        position = next((i for i, other in enumerate(queue) if other.arrival > seq.arrival), len(queue))
        queue.insert(position, seq)

    def drop_empty(self) -> None:
        """Forget lanes in which nobody waits."""
        for lane in [lane for lane, queue in self.items() if not queue]:
            del self[lane]
