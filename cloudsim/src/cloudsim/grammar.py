"""The commands and flags that a program knows, as data with their source, and a parser of argument lists."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from importlib import import_module
from typing import Any

from cloudsim.state import Refusal, load_facts
from embark.values import JsonDict, JsonMap, frozen

Kind = str
"""The kind of a flag: `bool`; `value`, which takes one word; `optional`, which takes one only after `=`; `list`, which
takes words up to the next flag; `repeat`, a value that may be given many times; `int`; `choice:a|b|c`; `switch`, which
may be followed by true or false."""

SWITCH_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@frozen
class CommandForm:
    """The positional arguments and flags of one command."""

    path: tuple[str, ...]
    positionals: Sequence[str] = ()  # `NAME`, optional `NAME?`, or `NAME*`, which takes the rest.
    flags: Mapping[str, Kind] = field(default_factory=dict)
    required: Sequence[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)  # Short names that only this command has.
    source: str = ""


@frozen
class ParsedCommand:
    """A command with the values of its arguments."""

    path: tuple[str, ...]
    positionals: JsonMap
    flags: JsonMap  # The key is the flag's first name, with its dashes.
    call: Any = None  # The call that it was read from, for commands that read files.

    @property
    def name(self) -> str:
        return " ".join(self.path)

    def __getitem__(self, flag: str) -> Any:
        """Return the value of a flag, or None if it was not given."""
        return self.flags.get(flag)

    def text(self, flag: str, default: str = "") -> str:
        found = self.flags.get(flag)
        return default if found is None else str(found)


@frozen
class Grammar:
    """The commands that a program accepts, and its messages for those it does not accept."""

    program: str
    version: str
    source: str
    date: str
    commands: Mapping[tuple[str, ...], CommandForm]
    flags: Mapping[str, Kind]  # Flags that every command has.
    aliases: Mapping[str, str]  # Maps `-n` to `--namespace`.
    unknown_flag: str  # A message with {flag} and {command}.
    unknown_command: str  # A message with {words}.
    missing_flag: str  # A message with {flag} and {command}.
    usage_code: int = 1
    ignores_case: bool = False  # Choices may differ in case.

    def parse(self, words: Sequence[str]) -> ParsedCommand:
        form, rest = self._form(words)
        command = " ".join((self.program, *form.path))
        known, aliases = {**self.flags, **form.flags}, {**self.aliases, **form.aliases}
        given: JsonDict = {}
        loose: list[str] = []
        index = 0
        while index < len(rest):
            word = rest[index]
            index += 1
            if word == "--":
                loose += rest[index:]
                break
            if not word.startswith("-") or word == "-":
                loose.append(word)
                continue
            name, has_value, value = word.partition("=")
            name = aliases.get(name, name)
            negated = name.startswith("--no-") and known.get(f"--{name[5:]}") == "bool"
            if negated:
                given[f"--{name[5:]}"] = False
                continue
            kind = known.get(name)
            if kind is None:
                raise Refusal(self.unknown_flag.format(flag=word.partition("=")[0], command=command), self.usage_code)
            if kind == "bool":
                given[name] = not has_value or value.lower() in ("true", "1", "yes")
            elif kind == "optional":
                given[name] = value if has_value else ""
            elif kind == "switch":
                if not has_value and index < len(rest) and rest[index].lower() in SWITCH_WORDS:
                    value, index = rest[index], index + 1
                given[name] = SWITCH_WORDS.get(value.lower(), True)
            elif kind == "list":
                taken = [value] if has_value else []
                while index < len(rest) and not _is_flag(rest[index]):
                    taken.append(rest[index])
                    index += 1
                given[name] = [*given.get(name, []), *taken]
            else:
                if not has_value:
                    if index >= len(rest):
                        raise Refusal(f"{command}: argument {name}: expected one argument", self.usage_code)
                    value, index = rest[index], index + 1
                self._check(kind, name, value, command)
                given[name] = [*given.get(name, []), value] if kind == "repeat" else value
        for flag in form.required:
            if not any(given.get(aliases.get(one, one)) is not None for one in flag.split("|")):
                raise Refusal(self.missing_flag.format(flag=flag.split("|")[0], command=command), self.usage_code)
        return ParsedCommand(form.path, self._positionals(form, loose, command), given)

    def _form(self, words: Sequence[str]) -> tuple[CommandForm, list[str]]:
        """Find the longest command that the first words name; flags of every command may precede it."""
        index = 0
        while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
            name, has_value, _ = words[index].partition("=")
            kind = self.flags.get(self.aliases.get(name, name))
            index += 1 if has_value or kind in ("bool", None) else 2
        before, words = list(words[:index]), list(words[index:])
        for length in range(min(len(words), 6), 0, -1):
            form = self.commands.get(tuple(words[:length]))
            if form is not None:
                return form, [*before, *words[length:]]
        raise Refusal(self.unknown_command.format(words=" ".join(words[:3])), self.usage_code)

    def _check(self, kind: Kind, name: str, value: str, command: str) -> None:
        if kind == "int" and not value.lstrip("-").isdigit():
            raise Refusal(f"{command}: argument {name}: invalid int value: '{value}'", self.usage_code)
        choices = kind[7:].split("|") if kind.startswith("choice:") else [value]
        known = value.lower() in map(str.lower, choices) if self.ignores_case else value in choices
        if not known:
            raise Refusal(f"{command}: argument {name}: invalid choice: '{value}' (choose from {', '.join(choices)})",
                          self.usage_code)

    def _positionals(self, form: CommandForm, loose: list[str], command: str) -> JsonDict:
        found: JsonDict = {}
        for name in form.positionals:
            if name.endswith("*"):
                found[name[:-1]], loose = loose, []
            elif loose:
                found[name.rstrip("?")] = loose.pop(0)
            elif not name.endswith("?"):
                raise Refusal(self.missing_flag.format(flag=name, command=command), self.usage_code)
        if loose:
            raise Refusal(self.unknown_flag.format(flag=loose[0], command=command), self.usage_code)
        return found


def load_grammar(program: str) -> Grammar:
    """Read `commands/PROGRAM.toml`."""
    raw = load_facts(f"commands/{program}.toml")
    commands = {tuple(name.split()): CommandForm(tuple(name.split()), **row) for name, row in raw["commands"].items()}
    return Grammar(program=program, commands=commands, flags=raw.get("flags", {}), aliases=raw.get("aliases", {}),
                   **raw["program"])


def load_handlers(cloud: str, shared: str) -> JsonDict:
    """Read the functions that answer commands from a cloud's `handlers.toml`; its module `shared` has those that all
    of its modules use."""
    found: JsonDict = {}
    common = vars(import_module(f"cloudsim.{cloud}.{shared}"))
    for module, rows in load_facts(f"{cloud}/handlers.toml").items():
        names = {**common, **vars(import_module(f"cloudsim.{cloud}.{module}"))}
        for command, row in rows.items():
            first, *rest = (names.get(word, word) for word in ([row] if isinstance(row, str) else row))
            found[command] = first(*rest) if rest else first
    return found


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not word[1].isdigit()
