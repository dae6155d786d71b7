"""Several prompts of each row, one after the other, each a template over columns and earlier answers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Self

from jobs.common.display import MAX_NAME_CHARS
from jobs.errors import InvalidJob, check_limit, unlike
from jobs.prompts.arguments import parse_sampling
from jobs.prompts.labels import COLUMNS as LABEL_COLUMNS
from jobs.prompts.messages import ChatOptions, forces_call, refuse_chat_options, split_chat_options
from jobs.prompts.response_options import LOGPROBS, run_values
from jobs.prompts.template_texts import template_texts
from jobs.runs.plans.names import KEPT_BESIDE
from jobs.runs.plans.option_checks import OF_PROMPTS, check_read, check_shard

#: Literals and values that a shard's prompts are put together from: some seconds of a thread.
MAX_SHARD_PIECES = 20_000_000
#: A text cut into (literal, column that follows it or None).
Pieces = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Template:
    """A text, or a chat whose message contents are such texts.

    Only plain column names may stand in braces: no attribute, index, conversion or format, because the template is part
    of a job and a job is not trusted. A value is never parsed again, so braces in the data are harmless.
    """

    texts: tuple[Pieces, ...]
    roles: tuple[str, ...] | None  # None: a single prompt text

    @classmethod
    def parse(cls, template: Any) -> Self:
        """Parse a text, or a list of {'role', 'content'} with texts as content. Raises InvalidJob."""
        texts, roles = template_texts(template)
        if roles is None:
            return cls((_parse_text(texts[0], "the template"),), None)
        pieces = [_parse_text(text, f"message {number} of the template") for number, text in enumerate(texts)]
        return cls(tuple(pieces), roles)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(column for text in self.texts for _, column in text if column is not None))

    def check_cost(self, rows: int) -> None:
        """Raise InvalidJob where the prompts of a shard of so many rows take more than MAX_SHARD_PIECES."""
        check_shard(sum(map(len, self.texts)), "pieces of the template", rows, MAX_SHARD_PIECES)

    def filled_chars(self, values: Mapping[str, object]) -> int:
        """Return how many characters `fill` would build: a few long values may stand there many times."""
        sizes: dict[str | None, int] = {None: 0, **{column: len(f"{value}") for column, value in values.items()}}
        return sum(len(literal) + sizes[column] for text in self.texts for literal, column in text)

    def fill(self, values: Mapping[str, object]) -> str | list[dict[str, str]]:
        parts: dict[str | None, str] = {column: f"{value}" for column, value in values.items()}
        parts[None] = ""
        filled = ["".join([part for literal, name in text for part in (literal, parts[name])]) for text in self.texts]
        if self.roles is None:
            return filled[0]
        return [{"role": role, "content": text} for role, text in zip(self.roles, filled, strict=True)]


#: What to do about braces that are no field's.
BRACES = "write {{ and }} for braces of text, or, for Jinja's, say template_format 'jinja' (--template-format jinja)"


def _parse_text(text: str, what: str) -> Pieces:
    """Cut a text at its braces. what: its name in errors, which say where to look and repeat none of it."""
    pieces: list[tuple[str, str | None]] = []
    try:
        for literal, column, form, conversion in Formatter().parse(text):
            is_plain = column is None or (0 < len(column) <= MAX_NAME_CHARS and not set(column) & set(".[]"))
            is_tag = column is not None and column[:1] == column[-1:] == "%"  # of Jinja's
            if form or conversion or not is_plain or is_tag:
                field = 1 + sum(column is not None for _, column in pieces)
                raise InvalidJob(f"{what}: field {field} is no plain column name; {BRACES}")
            pieces.append((literal, column))
    except ValueError as error:
        raise InvalidJob(f"{what}: {error}; {BRACES}") from None
    return tuple(pieces)


#: Prompts of a row; each is a turn in the batch.
MAX_STEPS = 20

ROW_COLUMNS = ("prompt_tokens", "completion_tokens", "cached_tokens", "error")
#: What the longest name of a column of a prompt's ends with.
LONGEST = "_prompt_logprobs"


def answer_columns(sampling: Mapping[str, Any], *, has_tools: bool) -> list[str]:
    """Return the columns that hold what an answer has of its own. Their types: jobs/parquet/asks/ask.py."""
    wanted = {
        "completion": True,
        "finish_reason": True,
        "reasoning": sampling.get("separate_reasoning"),
        "tool_calls": has_tools,
        "tool_call_error": has_tools,
        **{name: sampling.get(name) is not None for name in LOGPROBS},
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


@dataclass(frozen=True)
class PromptStep:
    """One of a row's prompts. sampling: all of its values, those of the run included. is_scored: against labels."""

    name: str
    template: Template
    sampling: Mapping[str, Any]
    chat: ChatOptions
    is_scored: bool = False

    @property
    def is_chat(self) -> bool:
        return self.template.roles is not None

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns that hold what comes of it, its answer's first, and what each of them is of an answer."""
        if self.is_scored:
            return {name: name for name in LABEL_COLUMNS}
        names = answer_columns(self.sampling, has_tools="tools" in self.chat)
        return {self.name if each == "completion" else f"{self.name}_{each}": each for each in names}


def parse_prompts(name: str, value: Any) -> list[dict[str, Any]]:
    """Return a run's prompts as mappings of name, template and, if any, sampling. Raises InvalidJob."""
    if not isinstance(value, list) or not value:
        raise unlike(name, value, 'a list such as [{"name": "summary", "template": "..."}, ...]')
    check_limit(len(value), MAX_STEPS, "prompts has {} entries")
    return [_parse_prompt(each, number) for number, each in enumerate(value)]


def _parse_prompt(value: Any, number: int) -> dict[str, Any]:
    if not isinstance(value, dict) or not {"name", "template"} <= value.keys() <= {"name", "template", "sampling"}:
        raise unlike(f"prompts[{number}]", value, "an object of name, template and, if at all, sampling")
    name, sampling = value["name"], value.get("sampling")
    longest = MAX_NAME_CHARS - len(LONGEST)
    if not isinstance(name, str) or not name.isidentifier() or len(name) > longest:
        raise unlike(
            f"the name of prompts[{number}]", name, f"a word of letters, digits and _, at most {longest} characters"
        )
    template_texts(value["template"])
    if sampling is not None and not isinstance(sampling, dict):
        raise unlike(f"the sampling of prompt {name!r}", sampling, "a mapping")
    for key in ("n", "seed"):
        if (sampling or {}).get(key) is not None:
            raise InvalidJob(f"prompt {name!r} has {key} of its own, which is one for all prompts of a run")
    return {"name": name, "template": value["template"], **({"sampling": sampling} if sampling else {})}


#: A shard's prompts and answers are held in memory until its part is written.
MAX_ROWS_PER_SHARD = 1_000_000


def run_sampling(value: Any, rows_per_shard: int, *, is_chat: bool) -> dict[str, Any]:
    """Return sampling values of a run's rows, without what asks for nothing; 0 and 0.0 are one. Raises InvalidJob."""
    if not isinstance(value, dict):
        raise unlike("sampling", value, "a mapping: on the command line write sampling:='{\"max_tokens\": 64}'")
    sampling = parse_sampling(value)
    if is_chat:
        split_chat_options(sampling)
    else:
        refuse_chat_options(sampling)
    sampling = {
        name: int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
        for name, value in run_values(sampling).items()
    }
    n = sampling.get("n", 1)
    if isinstance(n, int):
        check_shard(n, "completions of a row", rows_per_shard, MAX_ROWS_PER_SHARD)
    if isinstance(sampling.get("logit_bias"), dict):  # its keys as in the plan, which is JSON
        sampling["logit_bias"] = {str(key): bias for key, bias in sampling["logit_bias"].items()}
    return sampling


def make_steps(
    prompts: Sequence[Mapping[str, Any]],
    sampling: Mapping[str, Any],
    from_columns: Collection[str],
    rows_per_shard: int,
    has_labels: bool = False,
) -> tuple[PromptStep, ...]:
    """Return the prompts of a run, checked. from_columns: sampling values that each row brings. Raises InvalidJob."""
    steps = []
    if sampling.get("n", 1) != 1:
        raise InvalidJob("n is one where a row has several prompts: an answer of several fills in none")
    for number, prompt in enumerate(prompts, 1):
        template, name = Template.parse(prompt["template"]), prompt["name"]
        template.check_cost(rows_per_shard)
        is_chat = template.roles is not None
        # By the names that the run's have.
        own = run_sampling(prompt.get("sampling") or {}, rows_per_shard, is_chat=is_chat)
        if twice := sorted(own.keys() & from_columns):
            raise InvalidJob(f"{twice[0]} comes from a column, and prompt {name!r} has its own: leave one out")
        if is_scored := has_labels and number == len(prompts):
            check_read(own, "labels", OF_PROMPTS, f"the sampling of prompt {name!r}")
            left_out = ("tool_choice",) if forces_call(sampling) else ()
            read = [name for name in OF_PROMPTS if name not in left_out]
            sampling = {key: value for key, value in sampling.items() if key in read}
        values, chat = split_chat_options(run_sampling({**sampling, **own}, rows_per_shard, is_chat=is_chat))
        steps.append(PromptStep(name, template, values, chat, is_scored))
    _check_names(steps)
    return tuple(steps)


def _check_names(steps: Sequence[PromptStep]) -> None:
    """Raise InvalidJob where two columns would have one name, or a template names an answer not there yet."""
    taken = {*ROW_COLUMNS, *KEPT_BESIDE, "reused", "check_error"}
    for step in steps:
        for column in step.columns:
            if column in taken:
                raise InvalidJob(f"prompt {step.name!r} has a column {column!r}, which is there already: rename it")
            taken.add(column)
    for number, step in enumerate(steps):
        named = step.template.columns
        if not named:
            raise InvalidJob(
                f"the template of prompt {step.name!r} names no column and no earlier prompt, so that every "
                "row would ask the same: write {column} where a row's value goes"
            )
        for later in steps[number:]:
            if later.name in named:
                raise InvalidJob(
                    f"the template of prompt {step.name!r} names {later.name!r}, which has no answer yet "
                    "there: name columns and earlier prompts"
                )
