"""Shell text. A plain `str` is a value and is quoted; `Shell` is this program's own text and is inserted unchanged.

Scripts are Jinja templates that shellcheck can read: `@@value@@` is quoted for the shell unless it is `Shell`, and a
line that begins with `#%` is a statement.
"""

from __future__ import annotations

import ast
import json
import pprint
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embark.catalog import load_catalog
from embark.errors import ExitCode
from embark.values import JsonMap, frozen, read_table
from .folder import File
from .job import SCHEMES, SCRATCH, USER_ID, Job
from .yaml_text import header, nest, plain, yaml_part

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"
MAX_WIDTH = 110
Words = tuple[str, ...]
_VARIABLE = re.compile(r"\$(?:\{([^}]+)\}|(\w+))")
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")
_VALUE = re.compile(r"@(\w+)@")
COMMANDS = read_table(__file__, "commands.toml")
LOG = "/var/log/embark.log"  # The log of a plain machine.
CLUSTER_USD_PER_HOUR = {"aws": 0.55, "azure": 0.38, "gcp": 0.37}
"""The price of a control plane, two small machines and, on AWS, a NAT gateway: the clouds' price lists, 2026-11."""
LOGINS = {
    "aws": {"probe": "aws sts get-caller-identity", "fix": "aws sso login, or set AWS_PROFILE"},
    "azure": {"probe": "az account get-access-token --query expiresOn", "fix": "az login"},
    "gcp": {"probe": "gcloud auth print-access-token", "fix": "gcloud auth login"}
}
"""The command that fails without a valid login, and how to log in. `az account show` reads a file and never fails."""
PLACE = "CONSTANTS = None\n"  # The line of a body that makes way for the values.


class Shell(str):
    """Text that the shell reads unchanged, such as `"$ZONE"`. Never made of a value from outside."""

    __slots__ = ()


def render_template(name: str, **values: Any) -> str:
    """Render a file of `templates/` with these values."""
    return _environment().get_template(name).render(values)


def script_file(path: str, template: str, job: Job, **values: Any) -> File:
    return File(path, job_text(template, job, **values), is_executable=True)


def job_text(template: str, job: Job, **values: Any) -> str:
    """Render a template with these values and those that every template may use."""
    place = job.place
    own = [bucket for bucket in job.buckets if bucket.scheme == SCHEMES.get(job.cloud)]
    storage_account = needed_setting("STORAGE_ACCOUNT", place.storage_account,
                                     "a name for the storage account, 3 to 24 small letters and digits")
    return render_template(
        template, job=job, location=job.location, place=place, buckets=own, volume=job.volume, log=LOG,
        job_words=partial(job_words, job),
        is_vm=place.target in ("vm", "tpu-vm"), versions=load_catalog().versions, step_text=step_text,
        project_setting=needed_setting("PROJECT", place.account, "the id of your Google Cloud project"),
        storage_account_setting=storage_account, login=LOGINS.get(job.cloud),
        cluster_price=f"The cluster: {CLUSTER_USD_PER_HOUR.get(job.cloud, 0.0):.2f} USD an hour until it is deleted.",
        **values)


def script(about: str, *parts: str) -> str:
    """Return a bash script that stops at its first error."""
    body = "\n\n".join(part.strip("\n") for part in parts if part.strip())
    return f"#!/usr/bin/env bash\n{script_header(about)}\n{body}\n"


def script_header(about: str) -> Shell:
    # The option makes `x=$(function)` stop at the function's first error too; shells before bash 4.4 lack it.
    return Shell(f"{header(about)}set -euo pipefail\nshopt -s inherit_errexit 2>/dev/null || true\n")


def command(*words: str, indent: int = 0) -> Shell:
    """Return one command, broken before its options if it is long; `indent` is that of its first line."""
    quoted = [quote(word) for word in words]
    line = " ".join(quoted)
    if indent + len(line) <= MAX_WIDTH:
        return Shell(line)
    lines, now = [], ""
    for index, word in enumerate(quoted):
        if word.lstrip("\"'").startswith("-") and index > 0 and now:
            lines.append(now.rstrip())
            now = " " * (indent + 2)
        now += word + " "
    return Shell(" \\\n".join([*lines, now.rstrip()]))


def run(*words: str, indent: int = 0) -> Shell:
    """Return a command that changes something: it is printed, and skipped in a dry run."""
    return command(Shell("run"), *words, indent=indent)


def variable(name: str) -> Shell:
    return Shell(f'"${name}"')


def option(name: str, value: str) -> Shell:
    """`--name=value`, the value quoted unless it is `Shell`."""
    return Shell(f"{name}={quote(value)}")


def quote(word: Any) -> str:
    return str(word) if isinstance(word, Shell) else shlex.quote(str(word))


def comment_text(text: str) -> Shell:
    """Text for a line that is already a comment; no character of it ends the line."""
    return Shell(" ".join("".join(c if c.isprintable() else " " for c in text).split()))


def needed_setting(name: str, default: str, what: str) -> Shell:
    """Return a variable with a default, or one that the caller's environment must set. `what` is this program's
    text."""
    return Shell(f"{name}=${{{name}:-{quote(default)}}}" if default else f": \"${{{name}:?{what}}}\"")


def _file_header(about: str) -> Shell:
    return Shell(header(about))


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, finalize=quote,
        variable_start_string="@@", variable_end_string="@@", line_statement_prefix="#%",
        block_start_string="<%", block_end_string="%>", comment_start_string="<%#", comment_end_string="#%>",
        keep_trailing_newline=True, autoescape=False)
    environment.globals.update(header=script_header, file_header=_file_header, comment=comment_text, command=command,
                               run=run, shell=Shell, plain=plain, json=lambda value: Shell(json.dumps(value)),
                               yaml=lambda value, indent=0: Shell(yaml_part(value, indent)),
                               user=USER_ID, scratch=SCRATCH, exit_codes=ExitCode,
                               nest=lambda text, indent: Shell(nest(text, indent)))
    return environment


@frozen
class Step:
    """Commands that create something once, and the one that succeeds if it already exists."""

    what: str  # The created resource, for a person; empty if nothing is created.
    commands: tuple[Words, ...]
    unless: Words = ()
    remove: tuple[Words, ...] = ()  # Run in this order; one that finds nothing does not stop the next.
    wait_s: int = 0  # Seconds until the new object is visible everywhere.
    why: str = ""


def step_text(step: Step, indent: int = 0) -> Shell:
    """Return a step for a script; the first line is not indented."""
    pad = "\n" + " " * indent
    lines = [f"# {step.why}"] if step.why else []
    if step.unless:
        lines.append(f"if ! {command(*step.unless, indent=indent)} >/dev/null 2>&1; then")
    inner = 2 if step.unless else 0
    lines += [" " * inner + run(*words, indent=indent + inner) for words in step.commands]
    if step.wait_s:
        lines += [" " * inner + "# It is visible everywhere only after some seconds.",
                  " " * inner + run("sleep", str(step.wait_s))]
    return Shell(pad.join([*lines, *(["fi"] if step.unless else [])]))


def split_words(line: str) -> Words:
    """Return the words of a command line: those with a variable of the shell as shell text, the others as values."""
    return tuple(Shell(word) if "$" in word else shlex.split(word)[0] for word in _WORD.findall(line))


def job_words(
    job: Job, name: str, options: Mapping[str, object] | None = None, **values: str | Sequence[str]
) -> Words:
    """Return the words of a command of the job's cloud in commands.toml, and of those `options` that are true."""
    names = [name, *(option for option, is_used in (options or {}).items() if is_used)]
    return _filled(job, " ".join(COMMANDS[job.cloud][one] for one in names), values)


def job_steps(job: Job, name: str, **values: str | Sequence[str]) -> list[Step]:
    """Return the steps of this name of the job's cloud in commands.toml."""
    def commands(lines: Sequence[str]) -> tuple[Words, ...]:
        return tuple(_filled(job, line, values) for line in lines
                     if all(values.get(one, True) for one in _VALUE.findall(line)))

    steps = [Step(row.get("what", ""), commands(row["commands"]), _filled(job, row.get("unless", ""), values),
                  commands(row.get("remove", ())), row.get("wait_s", 0), row.get("why", ""))
             for row in COMMANDS[job.cloud][name]]
    return [step for step in steps if step.commands]


def _filled(job: Job, line: str, values: Mapping[str, str | Sequence[str]]) -> Words:
    known = {"name": job.name, "machine_type": job.location.machine_type, "machine": job.machine.name,
             "num_nodes": str(job.num_nodes), "zone": job.location.zone, "reservation": job.place.reservation,
             "storage_account": job.place.storage_account, **values}
    found: list[str] = []
    for word in split_words(line):
        whole = _VALUE.fullmatch(word)
        value = known[whole[1]] if whole else type(word)(_VALUE.sub(lambda match: str(known[match[1]]), word))
        found += [value] if isinstance(value, str) else value
    return tuple(found)


def substitute(words: Sequence[str], values: Mapping[str, str | Sequence[str]]) -> list[str]:
    """Return the words as a shell would pass them, with these variables; `"${NAME[@]}"` is a whole list."""
    passed: list[str] = []
    for word in words:
        if not isinstance(word, Shell):
            passed.append(word)
            continue
        assert "$(" not in word, f"{word}: the output of a command is not known here"
        (bare,) = shlex.split(word)
        array = re.fullmatch(r"\$\{(\w+)\[@\]\}", bare)
        if array:
            passed += [str(one) for one in values[array[1]]]
        else:
            passed.append(_VARIABLE.sub(lambda match: str(values[match[1] or match[2]]), bare))
    return passed


def python_text(template: str, values: JsonMap, *, about: str) -> str:
    """Return a file of `templates/` with `NAME = literal` lines for its `CONSTANTS`, under a header."""
    body = (TEMPLATES / template).read_text(encoding="utf-8")
    before, place, after = body.partition(PLACE)
    assert place, "the body has no place for its values"
    literals = {name: pprint.pformat(value, width=110, sort_dicts=False) for name, value in values.items()}
    text = header(about) + before + "".join(f"{name} = {literal}\n" for name, literal in literals.items()) + after
    ast.parse(text)
    return text
