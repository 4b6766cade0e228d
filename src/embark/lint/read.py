"""Files from disk, parsed. Bad input becomes a finding, never a traceback; nothing is executed."""

import ast
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from embark.errors import UserError
from embark.kubernetes.yaml_nodes import BadYaml, Node, SourceFile, Span, read_yaml
from embark.values import frozen
from .shell import Command, read_shell

_INSTRUCTION = re.compile(r"^[ \t]*([A-Za-z]+)[ \t]+((?:(?:.*\\[^\S\n]*|^[^\S\n]*#.*)\n)*.*\n?)", re.MULTILINE)
"""An instruction with its continued lines, and the comments between them."""
_FLAGS = re.compile(r"(?:\s*--\S+)*\s*")  # `--mount=…` and the like.
_HEREDOC = re.compile(r"<<-?[\"']?(\w+)[\"']?")


@frozen
class Instruction:
    """An instruction of a Dockerfile, with all its lines."""

    name: str
    location: Span  # The arguments, over all their lines.

    @property
    def text(self) -> str:
        """The arguments on one line."""
        lines = [line for line in self.location.text.splitlines() if not line.lstrip().startswith("#")]
        return " ".join(line.rstrip().removesuffix("\\").strip() for line in lines).strip()

    @property
    def words(self) -> list[str]:
        """The words of the exec form, else those between blanks."""
        if self.text.startswith("["):
            try:
                read = json.loads(self.text)
            except ValueError:
                return self.text.split()
            if isinstance(read, list):
                return [str(word) for word in read]
        return self.text.split()


@frozen
class Dockerfile:
    source: SourceFile
    instructions: tuple[Instruction, ...]
    commands: tuple[Command, ...]  # The commands of every RUN.

    @property
    def last_stage(self) -> list[Instruction]:
        """The instructions of the last stage."""
        starts = [number for number, one in enumerate(self.instructions) if one.name == "FROM"]
        return list(self.instructions[starts[-1]:]) if starts else list(self.instructions)

    @property
    def environment(self) -> list[tuple[str, str, Span]]:
        """The variables that ENV and ARG set."""
        found = []
        for one in self.instructions:
            if one.name not in ("ENV", "ARG"):
                continue
            words = [word for command in read_shell(one.location.source, one.location.start, one.location.end)
                     for word in command.assignments]
            if not words and one.name == "ENV":  # ENV NAME value
                name, _, value = one.text.partition(" ")
                words = [(name, value.strip(), one.location)]
            found += words
        return found

    def base_images(self) -> list[tuple[str, Span]]:
        """Return the image of each FROM, with the values of ARG; names of earlier stages are left out."""
        arguments = {name: value for name, value, _ in self.environment}
        stages: set[str] = set()
        images = []
        for one in self.instructions:
            if one.name != "FROM":
                continue
            words = [word for word in one.words if not word.startswith("--")]
            if not words:
                continue
            image = re.sub(r"\$\{?(\w+)(?::-([^}]*))?\}?", lambda m: arguments.get(m[1]) or m[2] or m[0], words[0])
            if image not in stages:
                images.append((image, one.location))
            if len(words) > 2 and words[1].lower() == "as":
                stages.add(words[2])
        return images


def read_dockerfile(source: SourceFile) -> Dockerfile:
    instructions: list[Instruction] = []
    commands: list[Command] = []
    text, at = source.text, 0
    while head := _INSTRUCTION.search(text, at):
        at = head.end()
        for mark in _HEREDOC.findall(text[head.start():source.end_of_line(head.start())]):
            last = re.compile(rf"^[^\S\n]*{mark}[^\S\n]*$", re.MULTILINE).search(text, at)
            at = source.end_of_line(last.end()) if last else len(text)
        one = Instruction(head[1].upper(), Span(source, head.start(2), at))
        instructions.append(one)
        if one.name == "RUN" and not one.text.startswith("["):
            start = _FLAGS.match(text, one.location.start, at).end()  # type: ignore[union-attr]
            commands += read_shell(source, source.end_of_line(start) if text.startswith("<<", start) else start, at)
    return Dockerfile(source, tuple(instructions), tuple(commands))


Kind = Literal["yaml", "shell", "dockerfile", "python", "requirements"]
MAX_BYTES = 2 * 1024 * 1024
MAX_FILES = 10_000
MAX_PYTHON_DEPTH = 200
SUFFIXES: dict[str, Kind] = {
    ".yaml": "yaml", ".yml": "yaml", ".json": "yaml", ".sh": "shell", ".bash": "shell", ".py": "python",
    ".dockerfile": "dockerfile", ".containerfile": "dockerfile"
}
_SHELL_START = re.compile(rb"#!\s*/\S*\b(?:ba|da|z|k)?sh\b|#!\s*/usr/bin/env\s+(?:ba|da|z|k)?sh\b")
_PYTHON_START = re.compile(rb"#!.*\bpython")
_TEMPLATE = re.compile(r"\{\{[-\s]*[.\w$\"]|\{%")


@frozen
class Document:
    """One YAML document: a Kubernetes object, a cluster file, or anything else."""

    source: SourceFile
    root: Node

    def __getitem__(self, key: str) -> Node:
        return self.root[key]

    def at(self, dotted: str) -> Node:
        return self.root.at(dotted)

    @property
    def kind(self) -> str:
        return self["kind"].text

    @property
    def api(self) -> str:
        return self["apiVersion"].text

    @property
    def name(self) -> str:
        return self.at("metadata.name").text

    @property
    def namespace(self) -> str:
        return self.at("metadata.namespace").text or "default"

    @property
    def location(self) -> Span:
        """The location of its name, else of its kind, else of its beginning."""
        for node in (self.root.at("metadata.name"), self.root["kind"], self.root):
            if node:
                return node.location
        return Span(self.source, 0, 0)


@dataclass(frozen=True)  # no slots: it has cached properties
class PythonFile:
    source: SourceFile
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def all_calls(self) -> list[tuple[str, ast.Call]]:
        """Every call, with the name of what is called."""
        return [(ast.unparse(node.func), node) for node in self.nodes if isinstance(node, ast.Call)]

    def location(self, node: ast.AST) -> Span:
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        end_line, end_column = getattr(node, "end_lineno", line), getattr(node, "end_col_offset", column)
        return Span(self.source, self._index(line, column), self._index(end_line, end_column))

    def calls(self, *names: str) -> list[ast.Call]:
        """Return calls of these names, whatever stands before the last dot."""
        return [call for dotted, call in self.all_calls
                if any(dotted == name or dotted.endswith("." + name) for name in names)]

    def _index(self, line: int, column: int) -> int:
        start = self.source.starts[min(line, len(self.source.starts)) - 1]
        end = self.source.starts[line] if line < len(self.source.starts) else len(self.source.text)
        # ast counts bytes of UTF-8.
        return start + len(self.source.text[start:end].encode()[:column].decode(errors="ignore"))


@frozen
class Unread:
    """A file, or the rest of one, that could not be read."""

    source: SourceFile
    index: int
    what: str
    fix: str
    is_ours: bool = True  # False for kinds of files that the linter does not read.


@frozen
class Files:
    sources: list[SourceFile] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    scripts: list[tuple[Command, ...]] = field(default_factory=list)
    """The commands of each script, and of each Dockerfile."""
    dockerfiles: list[Dockerfile] = field(default_factory=list)
    pythons: list[PythonFile] = field(default_factory=list)
    requirements: list[SourceFile] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)

    def add(self, source: SourceFile) -> None:
        self.sources.append(source)
        kind = kind_of(source.path, source.text[:200].encode())
        if kind == "yaml":
            self._yaml(source, source.text)
        elif kind == "shell":
            self._shell(source)
        elif kind == "dockerfile":
            self.dockerfiles.append(read_dockerfile(source))
            self.scripts.append(self.dockerfiles[-1].commands)
        elif kind == "python":
            self._python(source)
        elif kind == "requirements":
            self.requirements.append(source)
        else:
            self.unread.append(Unread(source, 0, "is not a YAML, shell, Dockerfile, Python or requirements file",
                                      "leave it out, or give it the right suffix", is_ours=False))

    def _yaml(self, source: SourceFile, text: str, *, is_certain: bool = True) -> None:
        roots, bad = read_yaml(source, text)
        if bad is not None and not is_certain:
            return
        for root in roots:
            contents = list(root["items"]) if root["kind"].text.endswith("List") and root["items"].items else [root]
            self.documents.extend(Document(source, one) for one in contents)
        if bad is not None:
            self.unread.append(_bad_yaml(source, bad))

    def _shell(self, source: SourceFile) -> None:
        commands = read_shell(source)
        self.scripts.append(tuple(commands))
        for command in commands:
            location = command.document
            if location is not None and re.search(r"^\s*(?:apiVersion|kind):", location.text, re.MULTILINE):
                # Blanks before it keep every location of the document that of the script.
                before = re.sub(r"[^\n]", " ", source.text[: location.start])
                self._yaml(source, before + location.text, is_certain=False)

    def _python(self, source: SourceFile) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source.text)
            if _depth(tree) > MAX_PYTHON_DEPTH:
                raise RecursionError("nested too deep")
            self.pythons.append(PythonFile(source, tree))
        except SyntaxError as error:
            line = min(max(error.lineno or 1, 1), len(source.starts))
            what = f"is not valid Python: {error.msg}"
            self.unread.append(Unread(source, source.starts[line - 1], what, "fix that line"))
        except (ValueError, RecursionError, MemoryError) as error:
            self.unread.append(Unread(source, 0, f"cannot be parsed as Python: {error}", "fix the file"))


def read_files(paths: Sequence[Path]) -> Files:
    """Read files, and those below folders that the linter knows."""
    return read_sources(_load(path, named=named) for path, named in _expand(paths))


def read_sources(loaded: Iterable[SourceFile | Unread]) -> Files:
    """Parse texts that are already loaded."""
    files = Files()
    for one in loaded:
        if isinstance(one, Unread):
            files.unread.append(one)
            files.sources.append(one.source)
        else:
            files.add(one)
    return files


def kind_of(path: Path, head: bytes = b"") -> Kind | None:
    """Tell a file's kind by its name, else by its first line."""
    name = path.name.lower()
    if name.startswith(("dockerfile", "containerfile")):
        return "dockerfile"
    if re.fullmatch(r"requirements.*\.(txt|in)", name):
        return "requirements"
    if path.suffix.lower() in SUFFIXES:
        return SUFFIXES[path.suffix.lower()]
    if _SHELL_START.match(head):
        return "shell"
    return "python" if _PYTHON_START.match(head) else None


def _bad_yaml(source: SourceFile, bad: BadYaml) -> Unread:
    index = source.starts[min(bad.line, len(source.starts)) - 1]
    if _TEMPLATE.search(source.text):
        return Unread(source, index, f"is a template, not YAML: {bad.what}",
                      "lint what it becomes: helm template CHART > all.yaml")
    return Unread(source, index, f"is not readable YAML: {bad.what}", "fix that line")


def _load(path: Path, *, named: bool) -> SourceFile | Unread:
    empty = SourceFile.of(path, "")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        if named:
            raise UserError(f"{path}: {error.strerror}", "name a file or folder that can be read") from error
        return Unread(empty, 0, f"cannot be read: {error.strerror}", "check its permissions")
    if len(data) > MAX_BYTES:
        return Unread(empty, 0, f"is longer than {MAX_BYTES / 1e6:.0f} MB", "lint the manifest alone")
    if b"\0" in data:
        return Unread(empty, 0, "is binary", "lint text files")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        return Unread(empty, 0, f"is not UTF-8: byte {data[error.start]:#04x} in line {line}", "save it as UTF-8")
    return SourceFile.of(path, text)


def _expand(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    seen: set[Path] = set()
    for path in paths:
        found = _below(path) if path.is_dir() else [path]
        for one in found:
            if one not in seen:
                seen.add(one)
                yield one, one == path
                if len(seen) > MAX_FILES:
                    raise UserError(f"{path}: more than {MAX_FILES:,} files", "name the folder of the manifests")


def _below(folder: Path) -> list[Path]:
    found = [path for path in sorted(folder.rglob("*")) if kind_of(path) is not None and path.is_file()]
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _depth(tree: ast.AST) -> int:
    """Return the depth of the tree, found without recursion."""
    depth, level = 0, [tree]
    while level:
        depth += 1
        level = [below for node in level for below in ast.iter_child_nodes(node)]
    return depth
