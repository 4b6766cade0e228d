"""`embark` and `python -m embark`: run a command and turn what it raises into an exit code."""

import os
import signal
import sys


def _leave(*_: object) -> None:
    os.write(2, b"Stopped by Ctrl-C\n")
    os._exit(130)


IS_PROGRAM = __name__ == "__main__" or os.path.basename(sys.argv[0]) == "embark"
if IS_PROGRAM and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)  # until a command runs there is nothing to end in order

from collections.abc import Sequence  # noqa: E402
from contextlib import nullcontext  # noqa: E402

from embark.errors import EmbarkError, ExitCode, Interrupted, leave  # noqa: E402


def main() -> None:
    """The entry point."""
    words = sys.argv[1:]
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if words[:1] != ["train"]:
        sys.exit(run(words))
    # Until the trainer's own handlers are installed: importing takes seconds, and a preemption can come meanwhile.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda *_: os._exit(ExitCode.PREEMPTED))
    leave(run(words))


def run(words: Sequence[str]) -> int:
    """Run one command; no error of ours leaves a traceback."""
    from cyclopts import CycloptsError

    from embark.cli.app import app, explain, name_clone, name_spec
    from embark.cli.console import Console, only_json_on_stdout

    console = Console(json="--json" in words, quiet="--quiet" in words or "-q" in words)
    is_program = signal.getsignal(signal.SIGINT) is _leave
    if is_program:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        names, apps, _ = app.parse_commands(list(words))
        for name, command in zip(names, apps[1:], strict=False):
            if command.default_command and not name.startswith("-"):
                command.help = None  # its own docstring instead of its line in the list of commands
        is_help = {"--help", "-h", "--version"} & {*words}
        with only_json_on_stdout() if console.json and not is_help else nullcontext():
            return int(app(list(words), exit_on_error=False, print_error=False, result_action="return_value") or 0)
    except CycloptsError as error:
        console.error(explain(error))
        return ExitCode.BAD_INPUT
    except EmbarkError as error:
        error.fix = name_clone(name_spec(error.fix, words))
        console.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        console.error(Interrupted("stopped by Ctrl-C"))
        return ExitCode.INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:  # rich turns the first into the second
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader closed the pipe, as `| head` does
        return ExitCode.DONE
    finally:
        if is_program:
            signal.signal(signal.SIGINT, _leave)


if __name__ == "__main__":
    main()
