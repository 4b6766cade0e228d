"""Container images: what was built on this machine, who is logged in to which registry, and what was pushed."""

from dataclasses import dataclass, field
from typing import Protocol


class Registry(Protocol):
    """A cloud's registries. A text that is returned is the builder's error; empty means yes."""

    def login_error(self, host: str, user: str, password: str) -> str: ...

    def push_error(self, image: str, logins: set[str]) -> str:
        """`logins`: the hosts that this machine is logged in to."""
        ...


@dataclass(slots=True)
class Images:
    """Of one machine and of the registries it pushes to."""

    local: set[str] = field(default_factory=set)
    pushed: dict[str, str] = field(default_factory=dict)  # Name with tag to digest.
    logins: set[str] = field(default_factory=set)

    def is_pushed(self, image: str) -> bool:
        name, _, digest = image.partition("@")
        if digest:
            repository = name.rpartition(":")[0] if ":" in name.rpartition("/")[2] else name
            return any(found == digest and one.startswith(f"{repository}:") for one, found in self.pushed.items())
        return name in self.pushed
