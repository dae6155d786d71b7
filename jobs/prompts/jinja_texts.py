"""The texts of a Jinja template, compiled together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from ..errors import InvalidJob, InvalidValue
from .arguments import MAX_PROMPT_BYTES
from .jinja_limits import LimitedEnvironment, TemplateProblem


class JinjaTexts:
    """A prompt's text, or the contents of a chat's messages. Of one thread at a time."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Raises InvalidJob for what is no template."""
        self._environment = LimitedEnvironment()
        compiled = [self._compiled(text) for text in texts]
        self._templates = [template for template, _ in compiled]
        #: The names that are taken from outside.
        self.names = frozenset(name for _, names in compiled for name in names)

    def render(self, values: Mapping[str, Any]) -> list[str]:
        """Return each text with the values filled in. Raises TemplateProblem."""
        texts = [self._environment.render(template, values) for template in self._templates]
        if (chars := sum(map(len, texts))) > MAX_PROMPT_BYTES:
            raise TemplateProblem(
                f"the prompt has {chars} characters, more than the limit of {MAX_PROMPT_BYTES} bytes: "
                "shorten it"
            )
        return texts

    def _compiled(self, text: str) -> tuple[jinja2.Template, frozenset[str]]:
        try:
            return self._environment.template(text)
        except jinja2.TemplateSyntaxError as error:
            where = f"the template, line {error.lineno}: {{}}"
            raise InvalidValue(where, str(error.message)[:200]) from None
        except TemplateProblem as problem:
            raise InvalidJob(f"the template, {problem}") from None
        except (SyntaxError, RecursionError, MemoryError, ValueError):
            raise InvalidJob(
                "the template is nested too deeply, or holds what Python cannot compile"
            ) from None
