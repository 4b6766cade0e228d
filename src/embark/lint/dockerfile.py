"""A Dockerfile as its instructions; those of RUN as shell commands."""

import json
import re
from dataclasses import dataclass

from embark.lint.shell import Command, read_shell
from embark.lint.source import Place, Source

_INSTRUCTION = re.compile(r"[ \t]*([A-Za-z]+)[ \t]+")
_HEREDOC = re.compile(r"<<-?[\"']?(\w+)[\"']?")


@dataclass(frozen=True, slots=True)
class Instruction:
    """`FROM`, `RUN`, …, and all that belongs to it."""

    name: str
    place: Place
    """The arguments, over all their lines."""

    @property
    def text(self) -> str:
        """The arguments on one line."""
        lines = [line for line in self.place.text.splitlines() if not line.lstrip().startswith("#")]
        return " ".join(line.rstrip().removesuffix("\\").strip() for line in lines).strip()

    @property
    def words(self) -> list[str]:
        """The exec form's words; else those between blanks."""
        if self.text.startswith("["):
            try:
                read = json.loads(self.text)
            except ValueError:
                return self.text.split()
            if isinstance(read, list):
                return [str(word) for word in read]
        return self.text.split()


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A whole file."""

    source: Source
    instructions: tuple[Instruction, ...]
    commands: tuple[Command, ...]
    """Of every RUN."""

    def all(self, name: str) -> list[Instruction]:
        return [one for one in self.instructions if one.name == name]

    @property
    def last_stage(self) -> list[Instruction]:
        """From the last FROM on."""
        starts = [number for number, one in enumerate(self.instructions) if one.name == "FROM"]
        return list(self.instructions[starts[-1]:]) if starts else list(self.instructions)

    @property
    def environment(self) -> list[tuple[str, str, Place]]:
        """What ENV and ARG set."""
        found = []
        for one in self.instructions:
            if one.name not in ("ENV", "ARG"):
                continue
            words = [word for command in read_shell(one.place.source, one.place.start, one.place.end)
                     for word in [*((n, v, p) for n, v, p in command.assignments)]]
            if not words and one.name == "ENV":  # ENV NAME value
                name, _, value = one.text.partition(" ")
                words = [(name, value.strip(), one.place)]
            found += words
        return found

    def base_images(self) -> list[tuple[str, Place]]:
        """The image of each FROM, with what ARG says of it; those that are an earlier stage's name are left out."""
        arguments = {name: value for name, value, _ in self.environment}
        stages: set[str] = set()
        images = []
        for one in self.all("FROM"):
            words = [word for word in one.words if not word.startswith("--")]
            if not words:
                continue
            image = re.sub(r"\$\{?(\w+)(?::-([^}]*))?\}?", lambda m: arguments.get(m[1]) or m[2] or m[0], words[0])
            if image not in stages:
                images.append((image, one.place))
            if len(words) > 2 and words[1].lower() == "as":
                stages.add(words[2])
        return images


def read_dockerfile(source: Source) -> Dockerfile:
    instructions: list[Instruction] = []
    commands: list[Command] = []
    text, at = source.text, 0
    while at < len(text):
        line_end = source.end_of_line(at)
        line = text[at:line_end]
        head = _INSTRUCTION.match(line)
        if head is None or line.lstrip().startswith("#"):
            at = line_end
            continue
        end = _end(source, at)
        name = head[1].upper()
        one = Instruction(name, Place(source, at + head.end(), max(end, at + head.end())))
        instructions.append(one)
        if name == "RUN" and not one.text.startswith("["):
            start = _skip_flags(one.place)
            is_document = text.startswith("<<", start)
            commands += read_shell(source, source.end_of_line(start) if is_document else start, one.place.end)
        at = end
    return Dockerfile(source, tuple(instructions), tuple(commands))


def _end(source: Source, at: int) -> int:
    """Past the instruction that begins here: its continued lines, comments between them, and here-documents."""
    text = source.text
    marks = [match[1] for match in _HEREDOC.finditer(text[at:source.end_of_line(at)])]
    while True:
        line_end = source.end_of_line(at)
        line = text[at:line_end].rstrip()
        is_comment = line.lstrip().startswith("#")
        if line_end >= len(text) or not (line.endswith("\\") or is_comment):
            break
        at = line_end
    for mark in marks:
        while line_end < len(text):
            start, line_end = line_end, source.end_of_line(line_end)
            if text[start:line_end].strip() == mark:
                break
    return line_end


def _skip_flags(place: Place) -> int:
    """Past `--mount=…` and its like."""
    match = re.match(r"(?:\s*--\S+)*\s*", place.text)
    return place.start + (match.end() if match else 0)
