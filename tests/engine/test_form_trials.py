"""Forms that kill what compiles them, or take too long: they fail by name, and nothing else does."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine import InvalidSampling, SamplingParams
from engine.structured import grammars
from engine.structured.grammars import Grammars
from sandbox import process
from tests.e2e.conftest import MODEL

END = frozenset({0})


def chain(length: int, name: str) -> str:
    """A grammar whose rules or terminals each stand for the next one."""
    links = "".join(f"{name}{place}: {name}{place + 1}\n" for place in range(length))
    return f'start: {name}0\n{links}{name}{length}: "a"'


def references(length: int) -> dict[str, Any]:
    links = {f"d{place}": {"$ref": f"#/$defs/d{place + 1}"} for place in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


def asking(**form: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=form)


@pytest.fixture
def forms() -> Iterator[Grammars]:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    made = Grammars(tokenizer, tokenizer.get_vocab_size(), END)
    yield made
    made.close()


@pytest.mark.parametrize(
    "form",
    [
        {"grammar": chain(8_000, "r")},
        {"grammar": chain(30_000, "T")},
        {"json": references(12_000)},
        {"json": {"allOf": [{"$ref": f"#/$defs/d{place}"} for place in range(5_000)], "$defs": {}}},
    ],
    ids=["rules", "terminals", "references", "allOf"],
)
def test_a_form_that_overruns_a_stack_fails_alone(forms: Grammars, form: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidSampling, match=rf"structured_outputs.{next(iter(form))} must be one that can"
    ):
        forms.matchers(asking(**form), END)
    assert forms.matchers(asking(choice=["yes", "no"]), END)


def slow_form() -> SamplingParams:
    return asking(grammar="start: " + " | ".join(f'"x{place} y"' for place in range(80_000)))


def test_a_form_that_takes_too_long_is_given_up(
    forms: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms.matchers(asking(regex="a"), END)
    monkeypatch.setattr(grammars, "LIMIT_S", 0.2)
    with pytest.raises(InvalidSampling, match=r"whose compilation went on for more than 0\.2 s"):
        forms.matchers(slow_form(), END)


def test_a_form_is_compiled_beside_another_that_takes_long(
    forms: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "LIMIT_S", 600.0)
    slow, other = forms.prepare(slow_form()), forms.prepare(asking(regex="b"))
    assert slow is not None
    assert other is not None
    other.result(timeout=120)
    assert not slow.done()
    forms.close()
    with pytest.raises(InvalidSampling, match=r"ended its process with -9"):
        slow.result(timeout=120)


def test_what_somebody_holds_is_not_compiled_again_however_many_others_come(
    forms: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread would wait for it."""
    monkeypatch.setattr(grammars, "MAX_GRAMMARS", 2)
    held = forms.prepare(asking(regex="held"))
    assert held is not None
    held.result(timeout=60)
    for number in range(4):
        forms.matchers(asking(regex=f"[0-{number + 1}]"), END)
    assert forms.prepare(asking(regex="held")) is held
    del held
    forms.matchers(asking(regex="y"), END)
    forms.matchers(asking(regex="z"), END)
    gc.collect()
    assert len(forms._known) == 2


def test_a_process_that_cannot_begin_fails_the_form_and_the_next_one_begins(
    forms: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(process, "_PROGRAM", "raise SystemExit(7)")
        with pytest.raises(InvalidSampling, match=r"no process for it starts.*with 7"):
            forms.matchers(asking(regex="a"), END)
    assert forms.matchers(asking(regex="a"), END)


def test_a_large_vocabulary_is_read_before_the_first_form(
    forms: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here and in the process that tries forms: the first one needs no other."""
    assert forms.begin() is None
    monkeypatch.setattr(grammars, "SMALL_VOCABULARY", 1)
    beginning = forms.begin()
    assert beginning is not None
    beginning.result(timeout=60)
    monkeypatch.setattr(process, "_PROGRAM", "raise SystemExit(7)")
    assert forms.matchers(asking(regex="a"), END)
