"""`embark logs`: the lines of all machines of a launched run, merged by time. It only reads."""

from typing import Annotated

from cyclopts import Parameter

from embark.cli.console import Console
from embark.cli.status import clock, sentence
from embark.errors import ExitCode
from embark.formatting import strip_control_chars, to_one_line
from embark.launch.backend import LogLine, backend_of
from embark.launch.run_registry import find_run, run_status
from embark.launch.shell import Shell


def logs(
    run: Annotated[str, Parameter(help="The run's name, as embark status lists it.")], /, *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"), negative="", show_default=False)] = False,
    console: Console = Console(),
) -> int:
    """Print the logs of all machines of a launched run, merged by time. With --json, prints one object per line.

    Parameters
    ----------
    follow
        Follow the logs until the run ends. Exit code 1 if it fails.
    """
    record = find_run(run)
    backend = backend_of(record.handle, Shell(), console.warning)
    for line in backend.logs(record.handle, follow=follow):
        console.show_line(line, _text)
    if not follow:
        return ExitCode.DONE
    status = run_status(record, Shell(), console.warning)
    console.text(sentence(status), style="bold")
    return ExitCode.OTHER if status.state == "failed" else ExitCode.DONE


def _text(line: LogLine) -> str:
    return f"{clock(line.time_ns / 1e9)} {to_one_line(line.source)} | {strip_control_chars(line.text)}"
