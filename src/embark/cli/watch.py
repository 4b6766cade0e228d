"""`embark watch`: runs on a live page, or in the terminal."""

import threading
import webbrowser
from collections.abc import Sequence
from contextlib import suppress

from embark.dashboard.runs import Runs
from embark.dashboard.server import require_token, serve_page
from embark.dashboard.terminal import watch_terminal
from embark.errors import UserError
from embark.formatting import pluralize
from embark.report.run_files import find_runs
from embark.values import frozen
from .console import Console, Flag

PORT = 8750  # The first that is tried; the next ones where it is taken.
NUM_PORTS = 20


@frozen
class ServedPage:
    """The address of the page, and the runs it shows."""

    url: str
    runs: tuple[str, ...]


def watch(
    *runs: str, host: str = "127.0.0.1", port: int | None = None, token: str = "", no_open: Flag = False,
    terminal: Flag = False, console: Console = Console()
) -> None:
    """Show runs live on a local page: curves, ranks, GPUs, costs, sharding, logs. Ctrl-C stops it.

    Parameters
    ----------
    runs
        A run's directory, name or URI, or a directory or URI with several runs; ./runs by default.
    host
        The address to listen on. Access from other machines requires a token.
    port
        The port to listen on; by default 8750 or the next free one; 0 for any.
    token
        Token required to open the page; generated if --host needs one.
    no_open
        Do not open a browser.
    terminal
        Instead, show the essentials in the terminal.
    """
    if terminal:
        if console.json:
            raise UserError("--terminal and --json are mutually exclusive", "embark report RUN --json")
        watch_terminal(find_runs(runs), console=console.out)
        return
    if port is not None and not 0 <= port <= 65_535:
        raise UserError(f"--port {port} is not a port", "--port 8750, or --port 0 for any")
    opens = not no_open and console.out.is_terminal and not console.json
    watch_page(console, runs, host=host, port=port, token=token, opens=opens)


def watch_page(
    console: Console, words: Sequence[str], *, host: str, port: int | None, token: str, opens: bool,
    until: threading.Event | None = None
) -> None:
    """Serve the page until Ctrl-C, or until `until` is set."""
    token = require_token(host, token)
    ports = [port] if port is not None else [*range(PORT, PORT + NUM_PORTS), 0]
    runs = Runs(find_runs(words))
    with suppress(KeyboardInterrupt), runs, serve_page(runs, host=host, ports=ports, token=token) as page:
        console.show(ServedPage(page.url, tuple(run.files.uri for run in runs.all())), _render)
        if opens:  # Some browsers print, and some are slow to start.
            threading.Thread(target=webbrowser.open, args=(page.url,), daemon=True).start()
        (until or threading.Event()).wait()


def _render(console: Console, page: ServedPage) -> None:
    found = f"watching {pluralize(len(page.runs), 'run')}" if page.runs else \
        "no runs yet: the page shows them as they start"
    console.text(f"{found}; Ctrl-C stops watching, not the runs")
    console.result(page.url)
