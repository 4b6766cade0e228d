"""What exists in an account: resources with a location, a time at which they are ready, and what they use."""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from importlib.resources import files
from typing import Any

from embark.values import JsonDict

Key = tuple[str, str]  # Kind and name.


class Refusal(Exception):
    """An error of a program, in the words of the real one."""

    def __init__(self, text: str, code: int = 1, *, out: str = "") -> None:
        super().__init__(text)
        self.text, self.code, self.out = text, code, out


class Clock:
    """Seconds since the account was opened. Only `sleep` and commands that wait advance it."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


@dataclass(slots=True)
class Resource:
    """One resource of an account."""

    kind: str
    name: str
    location: str = ""  # Region, zone or location.
    attributes: JsonDict = field(default_factory=dict)
    ready_at: float = 0.0  # Seconds on the account's clock; until then it is being created.
    uses: set[Key] = field(default_factory=set)  # Keys of resources that cannot be deleted before this one.
    is_paid: bool = False  # It costs money by the hour as long as it exists.

    @property
    def key(self) -> Key:
        return self.kind, self.name


class Resources:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._all: dict[Key, Resource] = {}

    def __iter__(self) -> Iterator[Resource]:
        return iter(list(self._all.values()))

    def add(self, kind: str, name: str, *, location: str = "", takes_s: float = 0.0, uses: Iterable[Key] = (),
            is_paid: bool = False, **attributes: Any) -> Resource:
        """Add a resource. The caller has refused a name that exists, in the words of its program."""
        made = Resource(kind, name, location, attributes, self.clock.now + takes_s, set(uses), is_paid)
        self._all[made.key] = made
        return made

    def find(self, kind: str, name: str) -> Resource | None:
        return self._all.get((kind, name))

    def of_kind(self, kind: str) -> list[Resource]:
        return [one for one in self._all.values() if one.kind == kind]

    def is_ready(self, resource: Resource) -> bool:
        return self.clock.now >= resource.ready_at

    def users_of(self, key: Key) -> list[Resource]:
        """List the resources that must be deleted before this one."""
        return [one for one in self._all.values() if key in one.uses]

    def remove(self, kind: str, name: str) -> None:
        self._all.pop((kind, name), None)

    def paid(self) -> list[Resource]:
        return [one for one in self._all.values() if one.is_paid]


@cache
def load_facts(name: str) -> JsonDict:
    """Read a TOML file of this package."""
    return tomllib.loads(files("cloudsim").joinpath(name).read_text(encoding="utf-8"))


@cache
def _schema(name: str) -> Any:
    import jsonschema

    return jsonschema.Draft7Validator(json.loads(files("cloudsim").joinpath(name).read_text(encoding="utf-8")))


def schema_error(name: str, document: Any) -> str:
    """Return where a document does not follow a JSON schema of this package, or an empty text."""
    for mistake in sorted(_schema(name).iter_errors(document), key=lambda one: list(map(str, one.absolute_path))):
        where = ".".join(map(str, mistake.absolute_path))
        if mistake.validator == "additionalProperties":
            unknown = sorted(set(mistake.instance) - set(mistake.schema.get("properties", {})))
            return f'unknown field "{unknown[0]}" (in {where})'
        return f"{where}: {mistake.schema.get('$comment', mistake.message)}"
    return ""


def versions_sold(ends: Mapping[str, date]) -> list[str]:
    """Return the versions of Kubernetes of which a cluster can be created today."""
    return [version for version, end in ends.items() if date.today() <= end]
