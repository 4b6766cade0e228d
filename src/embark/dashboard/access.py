"""Who may read the page: browsers of this machine, or anyone with the token."""

import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

from embark.errors import UserError

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                               "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""On every response."""
LEAST_TOKEN = 16
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def is_local(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def require_token(host: str, token: str) -> str:
    """The token that a page at `host` needs: beyond this machine one is generated where none is given."""
    if not is_local(host):
        token = token or secrets.token_urlsafe(24)
    if token and not (token.isascii() and token.replace("-", "").replace("_", "").isalnum()):
        raise UserError("--token may have only letters, digits, - and _", fix="leave it out: one is generated")
    if token and not is_local(host) and len(token) < LEAST_TOKEN:
        raise UserError(f"--token is too short: others can reach {host}",
                        fix=f"at least {LEAST_TOKEN} characters, or leave it out: one is generated")
    return token


@dataclass(frozen=True, slots=True)
class Guard:
    """Admits a request or not. Without a token, only names of this machine are answered, so that a page elsewhere
    cannot point its own name here (DNS rebinding)."""

    token: str = ""
    cookie: str = "embark_watch"

    def matches(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self.token.encode())

    def is_authorized(self, headers: Mapping[str, str]) -> bool:
        if not self.token:
            return True
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.matches(given.strip()):
            return True
        try:
            cookies = SimpleCookie(headers.get("Cookie", ""))
        except CookieError:
            return False
        return self.cookie in cookies and self.matches(cookies[self.cookie].value)

    def is_own_name(self, host: str) -> bool:
        """Whether the browser asked for one of our names; with a token that does not matter."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") and host.count(":") != 0 else host
        return bool(self.token) or name.strip("[]").lower() in LOCAL_NAMES

    def set_cookie(self) -> str:
        return f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Lax"
