"""The table of all ways. A job or a run may ask for one of them; see Way."""

from collections.abc import Mapping
from typing import Any

from jobs.context.checks import RepairOptions
from jobs.errors import InvalidJob
from jobs.prompts.ways.agreed import Agreement
from jobs.prompts.ways.tool_use import ToolUse
from jobs.prompts.ways.way import Way, WayOption

#: To add a way, add its file, and its class here.
WAYS: tuple[type[Way], ...] = (Agreement, ToolUse)


def _all_options() -> dict[str, WayOption]:
    """Return the options of all ways, by name."""
    options: dict[str, WayOption] = {}
    for way_class in WAYS:
        options.update(way_class.options)
    return options


WAY_OPTIONS: Mapping[str, WayOption] = _all_options()


def split_way(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keyword arguments that belong to no way, and the parsed options of ways. Raises InvalidJob."""
    remaining = {name: value for name, value in values.items() if name not in WAY_OPTIONS}
    options = {}
    for name, option in WAY_OPTIONS.items():
        value = values.get(name)
        if value is not None and value != []:
            options[name] = option.parse(name, value)
    return remaining, options


def way_of(options: Mapping[str, Any]) -> Way | None:
    """Return the way that parsed options ask for; None without options.

    Raises InvalidJob for options of two ways, and for options of a way whose main option is missing.
    """
    if not options:
        return None
    ways: list[Way] = []
    for way_class in WAYS:
        values = {name: options[name] for name in way_class.options if name in options}
        if not values:
            continue
        main_name = way_class.main_option()
        if main_name not in values:
            name = next(iter(values))
            raise InvalidJob(f"{name} is for {main_name}, which is missing: give {main_name} too")
        ways.append(way_class.of(values))
    if len(ways) > 1:
        names = " and ".join(way.main_option() for way in ways)
        raise InvalidJob(f"{names} do not go together: each says how a prompt gets its answer")
    return ways[0] if ways else None


def check_way_fits(way: Way, sampling: Mapping[str, Any], repairs: RepairOptions) -> None:
    """Raise InvalidJob for options that no way can be combined with: several answers, checks, and continuations."""
    name = way.main_option()
    if sampling.get("n", 1) != 1:
        raise InvalidJob(f"{name} and n do not go together: with {name}, a prompt has one answer")
    if repairs.may_ask_again:
        other = "continue_on_length" if repairs.check is None else "check"
        raise InvalidJob(f"{name} and {other} do not go together: leave one out")
