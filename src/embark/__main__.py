"""`embark` and `python -m embark`: runs a verb and turns what it raises into an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from embark.errors import EmbarkError, ExitCode, UserError


def main() -> None:
    """The entry point."""
    words = sys.argv[1:]
    if words[:1] == ["train"]:
        # Until the trainer listens itself: the rest is imported below, and a machine can be taken away meanwhile.
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda *_: os._exit(ExitCode.PREEMPTED))
    sys.exit(run(words))


def run(words: Sequence[str]) -> int:
    """Run one verb; no error of ours leaves a traceback."""
    from cyclopts import CycloptsError

    from embark.cli.app import app
    from embark.cli.console import Console

    console = Console(json="--json" in words, quiet="--quiet" in words or "-q" in words)
    try:
        return int(app(list(words), exit_on_error=False, print_error=False, result_action="return_value") or 0)
    except CycloptsError as error:
        console.error(UserError(str(error), fix="embark --help"))
        return ExitCode.BAD_INPUT
    except EmbarkError as error:
        console.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        console.error(EmbarkError("stopped by Ctrl-C"))
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has gone; leave without a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE


if __name__ == "__main__":
    main()
