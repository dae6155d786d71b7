"""Counts how many samples of a prompt give the same answer."""

from dataclasses import dataclass, field

from jobs.tasks import Completion


@dataclass
class Votes:
    """The samples of a prompt, grouped by the answer that they give.

    agree: the share of samples that must give the same answer. max_samples: the most samples that are drawn.
    """

    agree: float
    max_samples: int
    samples: list[Completion] = field(default_factory=list)
    _samples_by_answer: dict[str, list[Completion]] = field(default_factory=dict)

    def add(self, sample: Completion, answer: str | None) -> None:
        """Count a sample. answer: the text that groups samples; None if the sample agrees with no other sample."""
        self.samples.append(sample)
        if answer is not None:
            self._samples_by_answer.setdefault(answer, []).append(sample)

    @property
    def num_left(self) -> int:
        """Return how many more samples may be drawn."""
        return self.max_samples - len(self.samples)

    @property
    def are_open(self) -> bool:
        """Whether the vote is open: too few samples agree so far, but further samples may change this."""
        if not self.samples:
            return True
        if self.num_left == 0 or self.share >= self.agree:
            return False
        # The share that the commonest answer would have if all further samples gave it.
        highest_share = (len(self._commonest) + self.num_left) / self.max_samples
        return highest_share >= self.agree

    @property
    def share(self) -> float:
        """Return the share of samples that give the commonest answer."""
        return len(self._commonest) / len(self.samples)

    @property
    def winner(self) -> Completion:
        """Return the first sample with the commonest answer. If no sample has an answer, return the first sample."""
        candidates = self._commonest or self.samples
        return candidates[0]

    @property
    def _commonest(self) -> list[Completion]:
        """Return the samples that give the commonest answer."""
        # If several answers are equally common, the earliest one wins, because max returns the first maximum.
        return max(self._samples_by_answer.values(), key=len, default=[])
