"""Counts how many samples of a prompt give the same answer."""

from dataclasses import dataclass, field

from jobs.tasks import Completion


@dataclass
class Votes:
    """The samples of a prompt, grouped by the answer that they give.

    agree: the share of samples that an answer needs. max_samples: the most samples.
    """

    agree: float
    max_samples: int
    samples: list[Completion] = field(default_factory=list)
    _samples_by_answer: dict[str, list[Completion]] = field(default_factory=dict)

    def add(self, sample: Completion, answer: str | None) -> None:
        """Count a sample. answer: None for a sample that agrees with no other."""
        self.samples.append(sample)
        if answer is not None:
            self._samples_by_answer.setdefault(answer, []).append(sample)

    @property
    def num_left(self) -> int:
        """How many samples may follow."""
        return self.max_samples - len(self.samples)

    @property
    def are_open(self) -> bool:
        """Whether more samples are needed, and enough of them can still agree."""
        if not self.samples:
            return True
        if self.num_left == 0 or self.share >= self.agree:
            return False
        highest_share = (len(self._commonest) + self.num_left) / self.max_samples
        return highest_share >= self.agree

    @property
    def share(self) -> float:
        """The share of samples that give the commonest answer."""
        return len(self._commonest) / len(self.samples)

    @property
    def winner(self) -> Completion:
        """The first sample with the commonest answer; the first of all samples if none has an answer."""
        candidates = self._commonest or self.samples
        return candidates[0]

    @property
    def _commonest(self) -> list[Completion]:
        """The samples that give the commonest answer."""
        # If answers are equally common, the earliest wins: max keeps the first one.
        return max(self._samples_by_answer.values(), key=len, default=[])
