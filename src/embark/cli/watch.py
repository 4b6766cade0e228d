"""The verb that shows runs while they go on."""

from __future__ import annotations

from embark.cli.console import Console
from embark.cli.options import Flag
from embark.errors import UserError


def watch(
    *runs: str,
    host: str = "127.0.0.1",
    port: int | None = None,
    token: str = "",
    no_open: Flag = False,
    terminal: Flag = False,
    console: Console = Console(),
) -> int:
    """Show runs live on a page of this machine: curves, ranks, GPUs, money, sharding, logs. Ctrl-C ends it.

    Parameters
    ----------
    runs
        A run's directory, name or uri, or a folder or uri that holds runs; left out, ./runs.
    host
        The address to serve at. Beyond this machine only with a token.
    port
        The port to serve at; left out, 8750 or the next that is free; 0: any.
    token
        Asked of whoever opens the page. Made where --host needs one and none is given.
    no_open
        Do not open a browser.
    terminal
        Show the essentials in the terminal instead.
    """
    from embark.cli.watch_output import watch_in_terminal, watch_page

    if terminal:
        return watch_in_terminal(console, runs)
    if port is not None and not 0 <= port <= 65_535:
        raise UserError(f"--port {port} is no port", fix="--port 8750, or --port 0 for any")
    opens = not no_open and console.out.is_terminal and not console.json
    return watch_page(console, runs, host=host, port=port, token=token, opens=opens)
