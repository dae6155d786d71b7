"""Agreement: a prompt is sampled in small rounds until enough samples agree. The commonest answer wins.

Sources: self-consistency, arXiv:2203.11171; stopping once the samples agree, arXiv:2305.11860.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from jobs.context.checks import AGREE_ON, RepairOptions
from jobs.context.values import share, some_text, whole_number
from jobs.errors import InvalidJob
from jobs.items.item import Check, Item, Samples
from jobs.prompts.generated import PromptAnswer, merged, reseeded
from jobs.prompts.ways.votes import Votes
from jobs.prompts.ways.way import Way, WayOption
from jobs.tasks import Completion, Request

#: The samples of a round. They run side by side and share the prompt's prefill.
ROUND = 4
DEFAULT_MAX_SAMPLES = 16


@dataclass(frozen=True)
class Agreement(Way):
    """Draws samples until the share `agree` of them gives one answer, or until no answer can reach this share.

    A sample that was cut, or has nothing to compare, agrees with no other sample. A failed sample is not counted.
    agree: the share of samples that must give one answer, above 0 and at most 1.
    agree_on: the part of a text that is compared. None compares whole texts. "json" compares the texts as JSON. A JSON
    pointer (RFC 6901) compares a part of the JSON. A pattern compares the text of the pattern's first group.
    """

    agree: float
    max_samples: int = DEFAULT_MAX_SAMPLES
    agree_on: str | None = None

    options: ClassVar = {
        "agree": WayOption(
            share, "Sample each prompt until this share of its samples agrees, such as 0.7.", float
        ),
        "max_samples": WayOption(
            partial(whole_number, most=128),
            f"The most samples of a prompt; {DEFAULT_MAX_SAMPLES} by default.",
            int,
        ),
        "agree_on": WayOption(
            partial(some_text, most=1 << 12),
            "What is compared: json, a JSON pointer, or a pattern with a group.",
        ),
    }
    columns: ClassVar = {"votes": "float64", "samples": "int64"}

    @property
    def child_checks(self) -> Sequence[RepairOptions]:
        """Return the check by which a child process finds the part of a text to compare; () for whole texts."""
        if self.agree_on is None:
            return ()
        return (RepairOptions({AGREE_ON: self.agree_on}),)

    def check(self, sampling: Mapping[str, Any], tools: list[dict[str, Any]]) -> None:
        """Raise InvalidJob if all samples would be equal, or would not be texts."""
        if sampling.get("temperature") == 0:
            raise InvalidJob(
                "with temperature=0, all samples agree: raise temperature, or leave agree out"
            )
        if tools:
            raise InvalidJob("agree and tools do not go together: texts are compared")

    def item(self, request: Request) -> Item[PromptAnswer]:
        """Return the Item that draws rounds of samples, until enough agree or no further sample can help."""
        votes = Votes(self.agree, self.max_samples)
        rounds: list[Samples] = []
        while votes.are_open:
            sampling = {**request.sampling, "n": min(ROUND, votes.num_left)}
            if rounds:
                sampling = reseeded(sampling, f"sample {len(votes.samples)}")
            [samples] = yield [replace(request, sampling=sampling)]
            rounds.append(samples)
            good_samples = [sample for sample in samples if sample.finish_reason != "error"]
            if not good_samples:
                break  # the earlier samples decide
            for sample in good_samples:
                answer = yield from self._compared(sample)
                votes.add(sample, answer)

        if not votes.samples:
            [failed_samples] = rounds  # all samples of the first round have failed
            return PromptAnswer(samples=failed_samples[:1], num_generated=[0])
        extras = {"votes": votes.share, "samples": len(votes.samples)}
        # Each round is one request, whose samples share one prefill.
        first_of_rounds = [samples[0] for samples in rounds]
        return merged(votes.winner, prefills=first_of_rounds, samples=votes.samples, extras=extras)

    def _compared(self, sample: Completion) -> Item[str | None]:
        """Return the Item that finds the part of a sample to compare: None if the sample has nothing to compare."""
        if sample.finish_reason != "stop":
            return None
        if not self.child_checks:
            return sample.text.strip()
        [child_check] = self.child_checks
        part: str | None = yield Check(child_check, sample.text)
        return part
