"""Decides who gets an answer, how long a connection lasts, and what an answer may do in the browser.

Any page in a browser may send requests to 127.0.0.1. If an attacker points a name of his there (DNS rebinding), his
page can read the answers too. So only requests to the dashboard's own names are answered. If a token is set, browsers
have to log in with it. An action needs a POST from one of the dashboard's own pages. Pages show texts that producers
write: if such a text brought a script into a page, the browser would not run the script.
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
#: The seconds after which a browser has to log in again.
SESSION_S = 7 * 24 * 3600

#: The paths that need no login.
_OPEN = ("/login", "/livez")
_OPEN_FOLDER = "/static/"

#: The path that needs no login if the request has a token as its bearer, as those of Prometheus do.
METRICS_PATH = "/metrics"

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


#: The name of the login with the token of TOKENMILL_DASHBOARD_TOKEN.
SHARED_LOGIN = "the shared token"
#: The name that stands for everybody if the dashboard has no logins.
NO_LOGIN = "this machine"


class Sessions:
    """Makes and checks the cookies of browsers that have logged in.

    A cookie is signed with the token. So it stays valid over a restart, until its time is over or the token is changed.
    tokens: by the name of each login, its token.
    """

    def __init__(self, tokens: Mapping[str, str]) -> None:
        self._tokens = {name: token.encode() for name, token in tokens.items()}

    def name_of(self, token: str) -> str | None:
        """Return the name of the login that has a token; None if no login has it."""
        sent = token.encode(errors="surrogatepass")
        # The loop goes on after a match, so that its time does not tell which login it was.
        login = None
        for name, expected in self._tokens.items():
            if hmac.compare_digest(sent, expected):
                login = name
        return login

    def open(self, name: str, now: float) -> str:
        """Return the value of a new cookie for a login. now: Unix seconds."""
        end = str(int(now) + SESSION_S)
        return f"{end}.{self._signature(self._tokens[name], end)}"

    def holder(self, cookie: str, now: float) -> str | None:
        """Return the name of the login for which a cookie was made; None if the cookie is not valid."""
        end, _, signature = cookie.partition(".")
        sent = signature.encode(errors="surrogatepass")
        login = None
        for name, token in self._tokens.items():
            expected = self._signature(token, end).encode()
            if hmac.compare_digest(sent, expected):
                login = name
        if login is None or int(end) <= now:
            return None
        return login

    @staticmethod
    def _signature(token: bytes, end: str) -> str:
        """Return the signature of a cookie, with a token as the key. end: the cookie's last second, as a text."""
        text = b"session " + end.encode(errors="surrogatepass")
        return hmac.new(token, text, hashlib.sha256).hexdigest()


class Guard:
    """Wraps the application, and refuses requests that must not reach it. sessions: None if there are no logins."""

    def __init__(self, app: ASGIApp, hosts: Hosts, sessions: Sessions | None) -> None:
        self._app = app
        self._hosts = hosts
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = self._refusal(scope, Headers(scope=scope))
            app: ASGIApp = self._app if refusal is None else refusal
            await app(scope, receive, _with_safe_headers(scope["path"], send))

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the response to a request that is refused; None if the application may answer it."""
        host = headers.get("host", "")
        if not self._hosts.allows(host):
            text = (
                "this dashboard has another name: open the address that it printed, or add --host\n"
            )
            return PlainTextResponse(text, 403)
        is_action = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if is_action and not self._is_own(headers.get("origin"), host):
            return PlainTextResponse("the page that asks for this is of another site\n", 403)

        path = scope["path"]
        needs_login = path not in _OPEN and not path.startswith(_OPEN_FOLDER)
        if self._sessions is None or not needs_login:
            return None
        cookie = HTTPConnection(scope).cookies.get(SESSION_COOKIE, "")
        holder = self._sessions.holder(cookie, time.time())
        if holder is not None:
            scope.setdefault("state", {})["who"] = holder
            return None
        if path == METRICS_PATH and self._sessions.name_of(_bearer(headers)) is not None:
            return None

        if "hx-request" in headers:  # an open page updates itself: have the browser leave it
            return Response(headers={"HX-Redirect": "/login"})
        if is_action or "text/html" not in headers.get("accept", ""):
            return PlainTextResponse("log in first, at /login\n", 401)
        query = scope["query_string"].decode("ascii", errors="replace")
        to = f"{path}?{query}" if query else path
        return RedirectResponse(f"/login?to={quote(to, safe='')}", 303)

    def _is_own(self, origin: str | None, host: str) -> bool:
        """Whether the page that sends an action is one of ours. Programs other than browsers send no origin."""
        if origin is None:
            return True
        origin_host = origin.partition("://")[2].lower()
        return origin_host == host.lower() or self._hosts.is_named(origin_host)


def _with_safe_headers(path: str, send: Send) -> Send:
    """Return a `send` that adds headers to each response. The headers limit what a browser does with the response."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Content-Security-Policy"] = _POLICY
            headers["X-Frame-Options"] = "DENY"
            headers["X-Content-Type-Options"] = "nosniff"
            headers["Referrer-Policy"] = "same-origin"
            headers["Cross-Origin-Opener-Policy"] = "same-origin"
            if path.startswith(_OPEN_FOLDER):
                # Browsers may store static files, but check each time whether an upgrade has changed them.
                headers["Cache-Control"] = "no-cache"
            else:
                headers["Cache-Control"] = "no-store"
        await send(message)

    return send_with_headers


def _bearer(headers: Headers) -> str:
    """Return the bearer token of a request; "" if it has none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


#: The most seconds that a connection lasts. A browser opens a new connection for its next request.
CONNECTION_S = 30.0

#: The most connections at a time. A new connection beyond that closes the oldest one that has sent no request, so that
#: idle connections keep nobody out.
MAX_CONNECTIONS = 500


class TimedConnection(H11Protocol):
    """A connection that is closed after CONNECTION_S. If a request is being answered then, the answer is sent first."""

    made_at = 0.0

    def connection_made(self, transport: Any) -> None:
        """Start the timer. Close another connection first if there are too many."""
        if len(self.connections) >= MAX_CONNECTIONS:
            oldest = self._connection_to_close()
            oldest.transport.abort()
            self.connections.discard(oldest)
        super().connection_made(transport)
        self.made_at = self.loop.time()
        self._end = self.loop.call_later(CONNECTION_S, self.shutdown)

    def _connection_to_close(self) -> Any:
        """Return the oldest connection that has sent no request; if all have sent one, the oldest of all."""
        silent: list[Any] = []
        for connection in self.connections:
            if getattr(connection, "cycle", None) is None:
                silent.append(connection)
        candidates: list[Any] = silent or list(self.connections)
        return min(candidates, key=lambda connection: getattr(connection, "made_at", 0.0))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._end.cancel()
        super().connection_lost(exc)


#: The wrong tokens in a row after which logins are slowed down, and the most logins that wait then.
MAX_WRONG = 10
MAX_WAITING = 10


class LoginThrottle:
    """Slows logins down after MAX_WRONG wrong tokens in a row. The next right token ends this.

    pause_s: the seconds between two logins while they are slowed down.
    """

    def __init__(self, pause_s: float = 1.0) -> None:
        self._pause_s = pause_s
        self._num_wrong = 0
        self._num_waiting = 0
        self._lock = asyncio.Lock()

    async def wait(self) -> bool:
        """Wait until a login may be tried. Return False at once if too many logins wait already."""
        if self._num_wrong < MAX_WRONG:
            return True
        if self._num_waiting >= MAX_WAITING:
            return False
        self._num_waiting += 1
        try:
            async with self._lock:
                await asyncio.sleep(self._pause_s)
        finally:
            self._num_waiting -= 1
        return True

    def record(self, *, is_right: bool) -> None:
        """Record whether the token of a login was right."""
        self._num_wrong = 0 if is_right else self._num_wrong + 1
