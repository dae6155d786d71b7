"""Who gets an answer, for how long a connection is kept, and what an answer may do in the browser.

A browser lets any page send requests to 127.0.0.1, and a name that its owner points there (DNS rebinding)
lets that page read the answers: so only requests to our own names are answered. Where a token is set, a
browser has to log in with it. Actions need POST from our own pages. What producers write is shown in the
pages: should a way to smuggle a script in be found, the browser does not run it.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tokenmill.serving import Hosts

SESSION_COOKIE = "tokenmill_session"
SESSION_S = 7 * 24 * 3600

#: What is served to a browser that has not logged in.
_OPEN = ("/login", "/livez")
_OPEN_FOLDER = "/static/"

#: What is served to a program that sends the token with its request, as Prometheus does.
METRICS_PATH = "/metrics"

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


#: The name of the login whose token has none, and of everybody where there is no login.
SHARED_LOGIN = "the shared token"
NO_LOGIN = "this machine"


class Sessions:
    """Cookies of browsers that have logged in. They hold over a restart, and end with the token.

    tokens: each login's token by the login's name.
    """

    def __init__(self, tokens: Mapping[str, str]) -> None:
        self._tokens = {name: token.encode() for name, token in tokens.items()}

    def name_of(self, given: str) -> str | None:
        """Return the name of the login whose token was given; None if it is nobody's."""
        found = None
        for name, token in self._tokens.items():
            if hmac.compare_digest(given.encode(errors="surrogatepass"), token):
                found = name
        return found

    def open(self, name: str, now: float) -> str:
        """Return a new cookie's value for a login."""
        until = str(int(now) + SESSION_S)
        return f"{until}.{self._sign(self._tokens[name], until)}"

    def holder(self, cookie: str, now: float) -> str | None:
        """Return the name of the login that a cookie was made for; None if it does not hold."""
        until, _, signature = cookie.partition(".")
        found = None
        for name, token in self._tokens.items():
            signed = self._sign(token, until).encode()
            if hmac.compare_digest(signature.encode(errors="surrogatepass"), signed):
                found = name
        return found if found is not None and int(until) > now else None

    @staticmethod
    def _sign(token: bytes, until: str) -> str:
        text = b"session " + until.encode(errors="surrogatepass")
        return hmac.new(token, text, hashlib.sha256).hexdigest()


class Guard:
    """Stands before the whole application. sessions: None where everybody on this machine may look."""

    def __init__(self, app: ASGIApp, hosts: Hosts, sessions: Sessions | None) -> None:
        self._app, self._hosts, self._sessions = app, hosts, sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = self._refusal(scope, Headers(scope=scope))
            await (refusal or self._app)(scope, receive, self._marked(scope["path"], send))

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        if not self._hosts.allows(host):
            text = (
                "this dashboard has another name: open the address that it printed, or add --host\n"
            )
            return PlainTextResponse(text, 403)
        is_action = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if is_action and not self._is_own(headers.get("origin"), host):
            return PlainTextResponse("the page that asks for this is of another site\n", 403)
        if (
            self._sessions is None
            or scope["path"] in _OPEN
            or scope["path"].startswith(_OPEN_FOLDER)
        ):
            return None
        cookie = HTTPConnection(scope).cookies.get(SESSION_COOKIE, "")
        holder = self._sessions.holder(cookie, time.time())
        if holder is not None:
            scope.setdefault("state", {})["who"] = holder
            return None
        if scope["path"] == METRICS_PATH and self._sessions.name_of(_bearer(headers)) is not None:
            return None
        if "hx-request" in headers:  # the page is told to go there
            return Response(headers={"HX-Redirect": "/login"})
        if is_action or "text/html" not in headers.get("accept", ""):
            return PlainTextResponse("log in first, at /login\n", 401)
        query = scope["query_string"].decode("ascii", errors="replace")
        to = f"{scope['path']}?{query}" if query else scope["path"]
        return RedirectResponse(f"/login?to={quote(to, safe='')}", 303)

    def _is_own(self, origin: str | None, host: str) -> bool:
        """Whether an action's page is of this site. Programs that are no browser send no origin."""
        if origin is None:
            return True
        place = origin.partition("://")[2].lower()
        return place == host.lower() or self._hosts.is_named(place)

    @staticmethod
    def _marked(path: str, send: Send) -> Send:
        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY
                headers["X-Frame-Options"] = "DENY"
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "same-origin"
                headers["Cross-Origin-Opener-Policy"] = "same-origin"
                # What is loaded is asked for again after an upgrade; what is shown is kept nowhere.
                headers["Cache-Control"] = (
                    "no-cache" if path.startswith(_OPEN_FOLDER) else "no-store"
                )
            await send(message)

        return send_marked


def _bearer(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


#: Seconds that a connection lasts at most; a browser makes a new one for its next request.
CONNECTION_S = 30.0

#: At a time. A further one takes the place of the oldest that has not asked: those that hang keep nobody out.
MAX_CONNECTIONS = 500


class TimedConnection(H11Protocol):
    """One connection. What is being answered at its end is answered first."""

    made_at = 0.0

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= MAX_CONNECTIONS:
            silent: list[Any] = [
                each for each in self.connections if getattr(each, "cycle", None) is None
            ]
            oldest: Any = min(
                silent or self.connections, key=lambda each: getattr(each, "made_at", 0.0)
            )
            oldest.transport.abort()
            self.connections.discard(oldest)
        super().connection_made(transport)
        self.made_at = self.loop.time()
        self._end = self.loop.call_later(CONNECTION_S, self.shutdown)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        super().connection_lost(exc)


class TriesInTurn:
    """Lets logins be tried freely until ten were wrong; from then on one a second, and few wait for it."""

    def __init__(self, pause_s: float = 1.0) -> None:
        self._pause_s, self._wrong, self._waiting = pause_s, 0, 0
        self._turn = asyncio.Lock()

    async def take(self) -> bool:
        """Wait for a try. False: too many wait already."""
        if self._wrong < 10:
            return True
        if self._waiting >= 10:
            return False
        self._waiting += 1
        try:
            async with self._turn:
                await asyncio.sleep(self._pause_s)
        finally:
            self._waiting -= 1
        return True

    def note(self, *, is_right: bool) -> None:
        """Take note of what the try was."""
        self._wrong = 0 if is_right else self._wrong + 1
