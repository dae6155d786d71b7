"""PictureQueue: the sequences that wait for the features of their pictures, while others go on."""

import time
from bisect import insort

from engine.run.forward.pictures.tower import Tower
from engine.schedule.sequence import Sequence, SequenceStatus

MAX_SECONDS = 0.05  # of a step for pictures, unless a single one takes longer
MAX_READY = 16  # sequences of a lane whose features are there and that do not run yet: more would only take memory


class PictureQueue:
    """Computes pictures beside the steps, lane by lane in the order of arrival."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower
        self._waiting: list[Sequence] = []
        self._ready: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, seq: Sequence) -> None:
        """Have a sequence wait for its pictures' features."""
        seq.status = SequenceStatus.HELD
        insort(self._waiting, seq, key=lambda waiting: waiting.lane)

    def look(self) -> list[Sequence]:
        """Compute pictures for about MAX_SECONDS, at least one; return the sequences that are ready or have failed."""
        self._ready = [seq for seq in self._ready if seq.status is SequenceStatus.WAITING]
        began = time.perf_counter()
        last_seconds = 0.0  # that the picture before took
        looked_at: list[Sequence] = []
        while self._waiting:
            seq = self._waiting[0]
            ready = [other for other in (*self._ready, *looked_at) if other.lane <= seq.lane]
            if len(ready) >= MAX_READY:
                break
            assert seq.pictures is not None
            pictures = seq.pictures.seen
            missing = next((picture for picture in pictures if picture.features is None), None)
            if missing is not None and seq.status is SequenceStatus.HELD:
                elapsed = time.perf_counter() - began
                if last_seconds and elapsed + last_seconds > MAX_SECONDS:
                    break
                try:
                    self._tower.look(missing)
                except Exception as error:  # noqa: BLE001 - whatever one picture makes the tower raise
                    seq.fail(error)
                else:
                    last_seconds = time.perf_counter() - began - elapsed
                    continue
            del self._waiting[0]
            if seq.status is SequenceStatus.HELD:
                looked_at.append(seq)
                if seq.error is None:
                    for picture in pictures:
                        self._tower.look(picture)  # marks it as used last
        self._ready += [seq for seq in looked_at if seq.error is None]
        return looked_at
