"""Sample until they agree: a prompt is sampled in small rounds, and its commonest answer stands.

Source: self-consistency, arXiv:2203.11171; stopping once the samples agree, arXiv:2305.11860.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from jobs.context.checks import AGREE_ON, RepairOptions
from jobs.context.values import share, some_text, whole_number
from jobs.errors import InvalidJob
from jobs.items.item import Check, Item
from jobs.prompts.generated import PromptAnswer, hashed_seed, merged
from jobs.prompts.ways.way import Way, WayOption
from jobs.tasks import Completion, Request

#: Samples that run side by side; they share the prompt's prefill.
ROUND = 4
DEFAULT_MAX_SAMPLES, MOST_SAMPLES = 16, 128


@dataclass(frozen=True)
class Agreement(Way):
    """Draws samples until a share of them gives one answer, or no answer can reach that share any more.

    agree: the share, above 0 and at most 1. agree_on: what of a text is compared: None for all of it, "json" for its
    JSON, a JSON pointer (RFC 6901) for a part of that, or a pattern for its first group. A sample in which that is
    not found, that was cut or that failed agrees with no other.
    """

    agree: float
    max_samples: int = DEFAULT_MAX_SAMPLES
    agree_on: str | None = None

    options: ClassVar = {
        "agree": WayOption(
            share, "Sample each prompt until this share of its samples agrees, such as 0.7.", float
        ),
        "max_samples": WayOption(
            partial(whole_number, most=MOST_SAMPLES),
            f"Samples at most; {DEFAULT_MAX_SAMPLES} by default.",
            int,
        ),
        "agree_on": WayOption(
            partial(some_text, most=1 << 12),
            "What is compared: json, a JSON pointer, or a pattern with a group.",
        ),
    }
    columns: ClassVar = {"votes": "float64", "samples": "int64"}

    @property
    def has_checks(self) -> bool:  # type: ignore[override]
        """Whether a child process reads the answers."""
        return self.agree_on is not None

    def check(self, sampling: Mapping[str, Any], tools: list[dict[str, Any]]) -> None:
        """Raise InvalidJob where samples would all be alike, or would not be texts."""
        if sampling.get("temperature") == 0:
            raise InvalidJob("agree and temperature=0: samples would be alike: raise temperature")
        if sampling.get("n", 1) != 1:
            raise InvalidJob("agree and n: one answer stands: give max_samples in place of n")
        if tools:
            raise InvalidJob("agree and tools do not go together: texts are compared")

    def item(self, request: Request) -> Item[PromptAnswer]:
        """Draw rounds of samples, until they agree or cannot."""
        samples: list[Completion] = []
        votes: Counter[str] = Counter()
        first_of: dict[str, Completion] = {}
        while True:
            num_missing = min(ROUND, self.max_samples - len(samples))
            (drawn,) = yield [_round(request, len(samples), num_missing)]
            if drawn[0].finish_reason == "error":
                if not samples:
                    return PromptAnswer([drawn[0]], [0])
                break  # the samples before say what they say
            for sample in drawn:
                key: str | None = None
                if sample.finish_reason == "stop":
                    key = sample.text.strip()
                    if self.agree_on is not None:
                        question = RepairOptions({AGREE_ON: self.agree_on})
                        key = yield Check(question, None, sample.text)
                if key is not None:
                    votes[key] += 1
                    first_of.setdefault(key, sample)
            samples += drawn
            most = max(votes.values(), default=0)
            if most >= self.agree * len(samples) or len(samples) >= self.max_samples:
                break
            if most + self.max_samples - len(samples) < self.agree * self.max_samples:
                break

        winner = samples[0]
        if votes:
            # Counter keeps the order of the first votes, so that the earliest of equal answers wins.
            ((key, _),) = votes.most_common(1)
            winner = first_of[key]
        extras = {"votes": most / len(samples), "samples": len(samples)}
        return merged(winner, samples[::ROUND], samples, extras)


def _round(request: Request, num_drawn: int, num_samples: int) -> Request:
    """Return what draws further samples; each round has a seed that follows from the prompt's."""
    sampling = {**request.sampling, "n": num_samples}
    seed = sampling.get("seed")
    if num_drawn and seed is not None:
        sampling["seed"] = hashed_seed(f"{seed}:sample {num_drawn}")
    return replace(request, sampling=sampling)
