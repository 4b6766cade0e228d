"""Who may ask: this machine's own browser, or whoever has the token."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

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
"""On every answer."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def is_local(host: str) -> bool:
    """Does this address reach no further than this machine?"""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def new_token() -> str:
    return secrets.token_urlsafe(24)


@dataclass(frozen=True, slots=True)
class Guard:
    """Lets a request in or not. With no token, only names of this machine itself are answered: a page elsewhere that
    points its own name at us (DNS rebinding) is refused."""

    token: str = ""
    cookie: str = "embark_watch"

    def knows(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self.token.encode())

    def is_let_in(self, headers: Mapping[str, str]) -> bool:
        if not self.token:
            return True
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.knows(given.strip()):
            return True
        try:
            cookies = SimpleCookie(headers.get("Cookie", ""))
        except CookieError:
            return False
        return self.cookie in cookies and self.knows(cookies[self.cookie].value)

    def is_our_name(self, host: str) -> bool:
        """Is the name that the browser asked for one of ours? The token does the same where there is one."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") and host.count(":") != 0 else host
        return bool(self.token) or name.strip("[]").lower() in LOCAL_NAMES

    def set_cookie(self) -> str:
        return f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Lax"
