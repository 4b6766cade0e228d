"""`embark watch`: a live page of runs, or a live view in the terminal."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embark.cli.console import Console
from embark.dashboard import FolderPlace, Known, Place, Runs, serve_page
from embark.dashboard.access import is_local, new_token
from embark.dashboard.run_locations import Places
from embark.errors import EmbarkError, ExitCode, UserError
from embark.formatting import pluralize
from embark.report.locations import EVENTS, SPEC
from embark.store.errors import without_secrets

if TYPE_CHECKING:
    from embark.diagnose import Source

PORT = 8750
"""The first that is tried; the next ones where it is taken."""
NUM_PORTS = 20
MAX_DIAGNOSED_BYTES = 64 << 20
LEAST_TOKEN = 16


def watch_page(
    console: Console, words: Sequence[str], *, host: str, port: int | None, token: str, opens: bool,
    until: threading.Event | None = None,
) -> ExitCode:
    """Serve the page until Ctrl-C, or until `until` is set."""
    if not is_local(host):
        token = token or new_token()
    if token and not (token.isascii() and token.replace("-", "").replace("_", "").isalnum()):
        raise UserError("--token may have letters, digits, - and _ only", fix="leave it out: one is made")
    if token and not is_local(host) and len(token) < LEAST_TOKEN:
        raise UserError(f"--token is short: others than you may reach {host}",
                        fix=f"{LEAST_TOKEN} letters at least, or leave it out: one is made")
    ports = [port] if port is not None else [*range(PORT, PORT + NUM_PORTS), 0]
    known = Known(usd_per_hour, diagnose_run, without_secrets)
    runs = Runs(Places(words), known)
    with suppress(KeyboardInterrupt), runs, serve_page(runs, host=host, ports=ports, token=token) as page:
        found = runs.all()
        console.data({"url": page.url, "runs": [run.place.uri for run in found]})
        console.text(f"watching {pluralize(len(found), 'run')}; Ctrl-C ends it")
        console.result(page.url)
        if opens:
            _open(page.url)
        (until or threading.Event()).wait()
    return ExitCode.DONE


def watch_in_terminal(console: Console, words: Sequence[str]) -> ExitCode:
    """The same essentials for those who have no browser."""
    from embark.dashboard.terminal import watch_terminal

    watch_terminal(Places(words), console=console.out, price=usd_per_hour)
    return ExitCode.DONE


def usd_per_hour(spec_text: str) -> tuple[float | None, str]:
    """Of all machines of a spec, as they are paid, and a word on it; none where it names no machine."""
    import tomllib

    from embark.catalog import price_spec
    from embark.spec.load import resolve

    try:
        price = price_spec(resolve(tomllib.loads(spec_text)))
    except (EmbarkError, tomllib.TOMLDecodeError) as error:
        return None, f"No price: {str(error).splitlines()[0]}"
    if price is None:
        return None, "The spec's [place] names no machine, so there is no price."
    if price.usd_per_hour is None:
        return None, f"The catalog has no price of {price.title}."
    return price.usd_per_hour, price.title


def diagnose_run(place: Place) -> list[Mapping[str, Any]]:
    """What `embark diagnose` finds in its events and logs."""
    from embark.diagnose import sources_of

    names = [EVENTS, SPEC, *(log.name for log in place.logs())]
    sizes = {name: size for name in names if (size := place.size_bytes(name)) is not None}
    if sum(sizes.values()) > MAX_DIAGNOSED_BYTES:
        raise UserError(f"too long to be looked through here; ask in a terminal: embark diagnose {place.uri}")
    if isinstance(place, FolderPlace):
        inside = [str(Path(place.uri) / name) for name in sizes if name != SPEC]
        paths = [path for path in (*inside, *map(str, place.elsewhere)) if Path(path).is_file()]
        return _diagnosed(sources_of(paths).sources if paths else (), Path(place.uri) / SPEC)
    # Copied elsewhere: fetching a run to where it keeps its own files would be in the way of one that goes on here.
    with tempfile.TemporaryDirectory(prefix="embark-watch-") as scratch:
        for name, size in sizes.items():
            (Path(scratch) / name.replace("/", "-")).write_bytes(place.read(name, 0, size))
        return _diagnosed(sources_of([scratch]).sources, Path(scratch) / SPEC)


def _diagnosed(sources: Sequence[Source], spec_path: Path) -> list[Mapping[str, Any]]:
    from embark.diagnose import diagnose
    from embark.spec import load_spec

    try:
        spec = load_spec(str(spec_path)) if spec_path.is_file() else None
    except EmbarkError:  # a run's own spec helps, and is not needed
        spec = None
    report = diagnose(sources, spec=spec)
    return [{"name": one.name, "kind": one.kind, "cause": one.cause, "fix": one.fix, "command": one.command,
             "evidence": one.evidence.text, "place": Path(one.evidence.source).name, "line": one.evidence.line}
            for one in report.diagnoses]


def _open(url: str) -> None:
    import webbrowser

    # Some browsers print, and some are slow to come.
    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
