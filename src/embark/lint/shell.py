"""Shell text as commands and their words, each with its location. Nothing is run and no variable is looked up.

It knows quotes, escapes, continued lines, comments, here-documents, substitutions and the operators between commands.
What it cannot follow (aliases, `eval`, arrays) stays a word like any other.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from embark.kubernetes.yaml_nodes import SourceFile, Span
from embark.values import frozen

_BREAKS = frozenset(";&|()\n")
_RESERVED = frozenset({"if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case", "esac", "in",
                       "{", "}", "!", "time", "function", "select"})
_PREFIXES = frozenset({"sudo", "exec", "nohup", "time", "command", "nice", "stdbuf", "env", "timeout", "xargs",
                       "run"})  # the function of rendered scripts that shows a command and runs it
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_BRACKETS_AND_QUOTED = re.compile(r"'[^']*'?|\"[^\"]*\"?|[()]")
_NUMBER = re.compile(r"\d+[smhd]?")
_GLOBAL_FLAGS = frozenset({"-n", "--namespace", "--context", "--kubeconfig", "--project", "--account", "--profile",
                           "--subscription"})
"""Those that may stand before a program's subcommand, with a value after them."""
_MAX_NESTED = 8


@frozen
class Word:
    """A word as the shell passes it on. A `$NAME` or `$(…)` in it stays as it is written."""

    text: str
    location: Span


@frozen
class Command:
    """One simple command."""

    words: tuple[Word, ...]  # The program's name and its arguments; `sudo`, `exec` and their like are left out.
    assignments: tuple[tuple[str, str, Span], ...]  # `NAME=value` before it, and what `export` or `env` set.
    document: Span | None = None  # The here-document that is its input.

    @property
    def name(self) -> str:
        return self.words[0].text.rpartition("/")[2] if self.words else ""

    @property
    def argv(self) -> list[str]:
        return [word.text for word in self.words]

    @property
    def location(self) -> Span:
        return self.words[0].location if self.words else self.assignments[0][2]

    def begins(self, words: str) -> bool:
        """Return whether it is, say, `gcloud container clusters create`, whatever flags stand between."""
        name, *subcommands = words.split()
        if self.name != name:
            return False
        plain: list[str] = []
        before = ""
        for word in self.argv[1:]:
            if not word.startswith("-") and before not in _GLOBAL_FLAGS:
                plain.append(word)
            before = word
        return plain[: len(subcommands)] == subcommands

    def has(self, *flags: str) -> bool:
        return self.flag_word(*flags) is not None

    def flag(self, *flags: str) -> str | None:
        """Return the value of `--flag value` or `--flag=value`; empty if it has none."""
        found = self.flag_word(*flags)
        if found is None:
            return None
        index, word = found
        if "=" in word.text:
            return word.text.partition("=")[2]
        following = self.words[index + 1].text if index + 1 < len(self.words) else ""
        return "" if following.startswith("--") else following

    def flag_word(self, *flags: str) -> tuple[int, Word] | None:
        """Return the word that holds the flag, and its index."""
        for index, word in enumerate(self.words):
            if word.text.partition("=")[0] in flags:
                return index, word
        return None

    def value_location(self, *flags: str) -> Span:
        """Return the location of a flag's value, else of the flag, else of the command."""
        found = self.flag_word(*flags)
        if found is None:
            return self.location
        index, word = found
        return word.location if "=" in word.text or index + 1 >= len(self.words) else self.words[index + 1].location


def read_shell(source: SourceFile, start: int = 0, end: int | None = None, depth: int = 0) -> list[Command]:
    """Return all commands of a text, in order; those inside `$(…)` come after the one that holds them."""
    return list(_Lexer(source, start, len(source.text) if end is None else end, depth).commands())


@dataclass(slots=True)
class _Lexer:
    source: SourceFile
    at: int
    end: int
    depth: int
    _words: list[Word] = field(default_factory=list)
    _inner: list[tuple[int, int]] = field(default_factory=list)  # Substitutions of the command that is being read.
    _heredocs: list[tuple[str, bool, int]] = field(default_factory=list)
    """Here-documents of this line: the mark that ends each, whether tabs are stripped, and the index of its command."""
    _line: list[tuple[list[Word], list[tuple[int, int]]]] = field(default_factory=list)
    """The commands of this line that are read."""

    def commands(self) -> Iterator[Command]:
        text = self.source.text
        while self.at < self.end:
            character = text[self.at]
            if character == "\\" and text[self.at + 1 : self.at + 2] in ("\n", "\r"):
                self.at += 3 if text[self.at + 1 : self.at + 3] == "\r\n" else 2
            elif character == "\n":
                self.at += 1
                yield from self._end_of_line()
            elif character in _BREAKS:
                self.at += 1
                self._end_of_command()
            elif character.isspace():
                self.at += 1
            elif character == "#":
                self.at = self._find("\n")
            elif character in "<>":
                self._redirect()
            else:
                self._word()
        yield from self._end_of_line()

    def _word(self) -> None:
        start, parts, is_quoted = self.at, list[str](), False
        text = self.source.text
        while self.at < self.end:
            character, following = text[self.at], text[self.at + 1 : self.at + 2]
            if character == '"':
                is_quoted = not is_quoted
                self.at += 1
            elif character in "$`":
                parts.append(self._substitution())
            elif character == "\\" and (following in tuple('"\\$`\n') if is_quoted else following != "\n"):
                parts.append("" if following == "\n" else following)
                self.at += 2
            elif not is_quoted and character == "'":
                close = self._find("'", self.at + 1)
                parts.append(text[self.at + 1 : close])
                self.at = close + 1
            elif not is_quoted and (character.isspace() or character in _BREAKS or character in "<>\\"):
                break
            else:
                parts.append(character)
                self.at += 1
        self.at = min(self.at, self.end)
        word = "".join(parts)
        if word.isdigit() and self.at < self.end and text[self.at] in "<>":
            return  # 2>file
        self._words.append(Word(word, Span(self.source, start, self.at)))

    def _substitution(self) -> str:
        """`$NAME`, `${…}`, `$(…)` or a back-quoted command, as it is written."""
        text, start = self.source.text, self.at
        if text.startswith("$(", start):
            self.at = self._closing(start + 1)
            self._inner.append((start + 2, self.at - 1))
        elif text[start] == "`":
            close = self._find("`", start + 1)
            self._inner.append((start + 1, close))
            self.at = close + 1
        elif text.startswith("${", start):
            self.at = min(self._find("}", start) + 1, self.end)
        else:
            self.at += 1
        return text[start : self.at]

    def _closing(self, start: int) -> int:
        """Return the index behind the bracket that closes the one at `start`, minding quotes."""
        level = 0
        for found in _BRACKETS_AND_QUOTED.finditer(self.source.text, start, self.end):
            level += {"(": 1, ")": -1}.get(found[0], 0)
            if level == 0:
                return found.end()
        return self.end

    def _redirect(self) -> None:
        text = self.source.text
        if text.startswith("<<", self.at) and not text.startswith("<<<", self.at):
            self.at += 2
            strip = text.startswith("-", self.at)
            self.at += strip
            self._skip_blanks()
            self._word()
            if self._words:
                self._heredocs.append((self._words.pop().text, strip, len(self._line)))
            return
        while self.at < self.end and text[self.at] in "<>&|":
            self.at += 1
        self._skip_blanks()
        if self.at < self.end and not text[self.at].isspace() and text[self.at] not in _BREAKS:
            num_words = len(self._words)
            self._word()
            del self._words[num_words:]

    def _end_of_command(self) -> None:
        self._line.append((self._words, self._inner))
        self._words, self._inner = [], []

    def _end_of_line(self) -> Iterator[Command]:
        self._end_of_command()
        line, self._line = self._line, []
        documents = self._take_documents()
        for number, (words, inner) in enumerate(line):
            made = make_command(words, documents.get(number))
            if made is not None:
                yield made
            if self.depth < _MAX_NESTED:
                for start, end in inner:
                    yield from read_shell(self.source, start, end, self.depth + 1)

    def _take_documents(self) -> dict[int, Span]:
        """Return the bodies of the here-documents that the line just read has opened, by the number of their
        command."""
        taken: dict[int, Span] = {}
        for mark, strip, number in self._heredocs:
            last = re.compile(("^\t*" if strip else "^") + re.escape(mark) + "\r*$", re.MULTILINE)
            found = last.search(self.source.text, self.at, self.end)
            at = found.start() if found else self.end
            taken[number] = Span(self.source, self.at, at)
            self.at = min(self._find("\n", at) + 1, self.end)
        self._heredocs.clear()
        return taken

    def _skip_blanks(self) -> None:
        while self.at < self.end and self.source.text[self.at] in " \t":
            self.at += 1

    def _find(self, wanted: str, start: int | None = None) -> int:
        found = self.source.text.find(wanted, self.at if start is None else start, self.end)
        return self.end if found < 0 else found


def make_command(words: Sequence[Word], document: Span | None = None) -> Command | None:
    """Make a command of words: drop prefixes such as sudo, and separate assignments."""
    rest, assignments = list(words), list[tuple[str, str, Span]]()
    while rest:
        head = rest[0].text
        if head in _RESERVED:
            rest.pop(0)
        elif _ASSIGNMENT.match(head):
            word = rest.pop(0)
            name, _, value = word.text.partition("=")
            assignments.append((name.rstrip("+"), value, word.location))
        elif head.rpartition("/")[2] in _PREFIXES and len(rest) > 1:
            rest.pop(0)
            while rest and (rest[0].text.startswith("-") or (head == "timeout" and _NUMBER.fullmatch(rest[0].text))):
                rest.pop(0)
        else:
            break
    if rest and rest[0].text in ("export", "declare", "readonly"):
        for word in rest[1:]:
            name, equals, value = word.text.partition("=")
            if equals:
                assignments.append((name, value, word.location))
    return Command(tuple(rest), tuple(assignments), document) if rest or assignments else None
