"""What keeps web pages of others from acting in rq-dashboard, and jobs' own text from running in it.

Whom the pages answer at all is the whole dashboard's matter.
"""

from __future__ import annotations

import re
import secrets

from flask import Flask, Response, abort, request
from jinja2.ext import Extension

#: rq-dashboard's script sends this cookie's value back in the header of each action.
TOKEN_COOKIE, TOKEN_HEADER = "_csrf_token", "X-CSRFToken"

#: A value that the page's script puts into HTML as it stands, unless the template itself escapes it.
_UNESCAPED = re.compile(r"<%=(?!\s*\$\('<div/>'\)\.text\()")


class EscapedValues(Extension):
    """Escapes what rq-dashboard 0.9's templates write into HTML and into a script as it stands."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Return the template's text with each such place mended."""
        return _UNESCAPED.sub("<%-", source).replace("'{{ queue.name }}'", "{{ queue.name|tojson }}")


def guard(app: Flask) -> None:
    """Act only on a page of our own.

    An action needs POST, and in a header the token that every answer carries in a cookie: pages of other
    sites can read neither.
    """
    token = secrets.token_urlsafe(32)
    app.jinja_env.add_extension(EscapedValues)

    @app.before_request
    def refuse_strangers() -> None:
        if request.method in ("GET", "HEAD", "OPTIONS"):
            if request.url_rule is not None and "POST" in (request.url_rule.methods or ()):
                abort(405, "this is an action: the dashboard's pages send it by POST")
        elif not secrets.compare_digest(request.headers.get(TOKEN_HEADER, "").encode(), token.encode()):
            abort(403, "the page is of an earlier dashboard, or not of this one: load it again")

    @app.after_request
    def mark_as_ours(response: Response) -> Response:
        response.set_cookie(TOKEN_COOKIE, token, samesite="Strict")
        return response
