"""`embark report` and `embark compare`: beside a run's events, what its store, the catalog and its logs say."""

from __future__ import annotations

import shlex
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from embark.cli.console import Console
from embark.errors import EmbarkError, ExitCode, UserError
from embark.events.events import Event
from embark.formatting import MISSING, format_float, to_one_line
from embark.report.compare import Comparison, as_data, compare, compare_document, sparkline
from embark.report.context import Finding, Kept, Price, RunContext
from embark.report.html_page import GENERATOR, html_page
from embark.report.markdown_page import markdown_page
from embark.report.record import Record, read_record
from embark.report.report import report
from embark.report.status import sentence, standing
from embark.spec import RunSpec, resolve
from embark.store import RunDir, find_run, open_store, write_atomic

NAME = "report.html"
MAX_QUICK_BYTES = 6_000_000
"""Of events: at a run's end a report of more would keep its user waiting."""
CURVE_WIDTH = 32
_HEAD_BYTES = 4096


def report_run(console: Console, word: str, *, out: str, markdown: bool, is_shown: bool) -> ExitCode:
    """Write the report of one run."""
    run = find_run(word)
    run.fetch()
    record, around = gather(run, console.warning)
    document = report(record, around)
    page = html_page(document)
    if out == "-":
        console.raw(markdown_page(document) if markdown else page)
        return ExitCode.DONE
    written = [_put(run, out or NAME, page, is_own=not out)]
    if markdown:
        written.append(_put(run, _beside(out or NAME), markdown_page(document), is_own=not out))
    now = standing(record, around.now_s, is_remote=run.is_remote)
    console.data({"run": run.uri, "report": written[0], "markdown": written[1] if markdown else None,
                  "state": now.state, "sentence": document.sentence, "steps": record.steps_done,
                  "eval": dict(record.history.eval), "held_s": record.held_s})
    console.text(document.sentence)
    console.result(f"wrote {' and '.join(written)}")
    if is_shown:
        _show(console, run, written[0], page)
    return ExitCode.DONE


def compare_runs(console: Console, words: Sequence[str], *, out: str) -> ExitCode:
    """Set runs side by side, here and, with `out`, on a page."""
    if len(words) < 2:
        raise UserError("a comparison needs two runs", fix="embark compare RUN RUN")
    gathered = []
    for word in words:
        run = find_run(word)
        run.fetch()
        gathered.append(gather(run, console.warning, is_looked_into=False))
    found = compare(gathered)
    page = html_page(compare_document(found)) if out else ""
    if out == "-":
        console.raw(page)
        return ExitCode.DONE
    written = _put(None, out, page, is_own=False) if out else None
    console.data({**as_data(found), "report": written})
    if not console.json and not console.quiet:
        _tell(console, found)
    console.result(found.sentence)
    if written:
        console.text(f"wrote {written}")
    return ExitCode.DONE


def gather(run: RunDir, warn: Callable[[str], None], *, is_looked_into: bool = True) -> tuple[Record, RunContext]:
    """A run's events, and all that is known besides. What cannot be read is warned of and left out."""
    record = read_record(run.path)
    spec_toml, values = _spec_text(run, warn)
    spec = _spec(values)
    price, no_price = price_of(spec, record)
    kept, best_by = _kept(run, warn) if is_looked_into else ((), "")
    # The directory's name and not the spec's: NAME-2 is another run of the same spec.
    name = run.uri.rstrip("/").rsplit("/", 1)[-1] if run.is_remote else run.path.resolve().name
    return record, RunContext(
        name=name, uri=run.uri, now_s=time.time(), is_remote=run.is_remote, spec=values, spec_toml=spec_toml,
        price=price, no_price=no_price, kept=kept, best_by=best_by,
        findings=_findings(run, spec, warn) if is_looked_into else None, commands=_commands(run, record),
    )


def price_of(spec: RunSpec | None, record: Record) -> tuple[Price | None, str]:
    """Of the machines that the spec names, if it ran on them; else why there is none."""
    if spec is None:
        return None, "There is no spec, so there is no price: hours only."
    from embark.catalog import price_spec

    try:
        price = price_spec(spec)
    except EmbarkError as error:
        return None, f"No price is known: {to_one_line(error.what)}."
    if price is None:
        return None, "The spec names no machine of a cloud, so there is no price: hours only."
    ranks, num_ranks = record.start.get("world_size"), price.num_machines * price.machine.num_gpus
    if record.has_begun and (record.start.get("device") == "cpu" or ranks != num_ranks):
        device = to_one_line(record.start.get("device_name") or record.start.get("device") or "another machine")
        return None, (f"The spec names {price.num_machines} x {price.machine.name}, but it ran on {device} with {ranks} "
                      f"of {num_ranks} ranks: hours only.")
    if price.usd_per_hour is None:
        return None, f"The catalog has no price of {price.title}: hours only."
    return Price(price.usd_per_hour, f"{price.title}, ${price.usd_per_hour:,.2f} an hour"), ""


class ReportAtEnd:
    """A sink that writes the report when a run ends. Whatever goes wrong in here, the run is not the worse for it."""

    def __init__(self) -> None:
        self._run: RunDir | None = None
        self._is_written = False

    def emit(self, event: Event) -> None:
        if event.kind == "start":
            self._run = RunDir(str(event.values.get("run_dir", "")))
            self._is_written = False
        elif event.kind == "end":
            self._write()

    def close(self) -> None:
        """A run that failed ends without saying so."""
        self._write()

    def _write(self) -> None:
        if self._run is None or self._is_written:
            return
        self._is_written = True
        try:
            if self._run.events.stat().st_size <= MAX_QUICK_BYTES:
                record, around = gather(self._run, lambda _: None, is_looked_into=False)
                # Where the run lives in a store, the file goes there with the other small ones.
                write_atomic(self._run.path / NAME, html_page(report(record, around)))
        except Exception:  # a picture of the run is not worth the run
            return


def _spec_text(run: RunDir, warn: Callable[[str], None]) -> tuple[str, dict[str, Any]]:
    try:
        text = run.spec.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except OSError:
        warn(f"{run.spec} is not there: the report cannot say what was run")
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        warn(f"{run.spec} cannot be read: {error}")
    return "", {}


def _spec(values: dict[str, Any]) -> RunSpec | None:
    """One of another version is shown as it stands, and counted with no further."""
    try:
        return resolve(values) if values else None
    except UserError:
        return None


def _kept(run: RunDir, warn: Callable[[str], None]) -> tuple[tuple[Kept, ...], str]:
    from embark.store.checkpoint_inspect import list_checkpoints

    try:
        listed = list_checkpoints(run)
    except EmbarkError as error:
        warn(f"the checkpoints could not be looked at: {error.what}")
        return (), ""
    rows = []
    for one in listed.checkpoints:
        metric = format_float(one.metric) if one.metric is not None else ""
        why = ", ".join(one.kept) or "no rule" if one.state == "committed" else \
            f"{one.state}{f': {one.damage[0]}' if one.damage else ''}"
        rows.append(Kept(one.step, one.time_s, one.size_bytes, metric, why, one.state == "committed"))
    return tuple(rows), listed.best_by or ""


def _findings(run: RunDir, spec: RunSpec | None, warn: Callable[[str], None]) -> tuple[Finding, ...] | None:
    from embark.diagnose import diagnose, sources_of

    try:
        sources = sources_of([str(run.path)]).sources
        found = diagnose(sources, spec=spec)
    except EmbarkError as error:
        warn(f"no diagnosis: {error.what}")
        return None
    return tuple(
        Finding(one.name, one.cause, one.fix, f"{one.evidence.place}: {one.evidence.text}", one.command,
                one.kind == "slow")
        for one in found.diagnoses
    )


def _commands(run: RunDir, record: Record) -> tuple[str, ...]:
    is_done = record.end.get("outcome") == "done"
    if run.is_remote:
        copy = shlex.join(["embark", "data", "copy", f"{run.uri}/spec.toml", "spec.toml"])
        return copy, "embark train spec.toml" + (" --fresh" if is_done else "")
    train = shlex.join(["embark", "train", str(run.spec)])
    return (f"{train} --fresh",) if is_done else (f"{train}   # goes on from its last checkpoint", f"{train} --fresh")


def _put(run: RunDir | None, out: str, text: str, *, is_own: bool) -> str:
    """Into the run's own directory, to a uri, or to a file, which must be none of another kind."""
    if run is not None and is_own:
        if run.is_remote:
            run.store.write(out, text.encode())
        else:
            _write_file(run.path / out, text)
        return run.store.where(out)
    if "://" in out and not out.startswith("file://"):
        folder, _, name = out.rpartition("/")
        open_store(folder).write(name, text.encode())
        return out
    path = Path(out.removeprefix("file://")).expanduser()
    _refuse_other(path)
    _write_file(path, text)
    return str(path)


def _refuse_other(path: Path) -> None:
    """A slip of the pen must not cost a file that is no report."""
    if path.is_dir():
        raise UserError(f"{path} is a folder", fix=f"--out {path / NAME}")
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            if GENERATOR.encode() not in file.read(_HEAD_BYTES):
                raise UserError(f"{path}: exists already, and is no report of Embark's",
                                fix="name another file, or remove it first")


def _write_file(path: Path, text: str) -> None:
    try:
        write_atomic(path, text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", fix="--out FILE writes elsewhere") from error


def _beside(out: str) -> str:
    stem = out.removesuffix(".html").removesuffix(".htm")
    return f"{stem}.md"


def _show(console: Console, run: RunDir, written: str, page: str) -> None:
    import webbrowser

    path = Path(written)
    if "://" in written:
        path = run.path / NAME
        _write_file(path, page)
    if not webbrowser.open(path.resolve().as_uri()):
        console.warning(f"no browser could be started here; open {path} yourself")


def _tell(console: Console, found: Comparison) -> None:
    names = [side.name for side in found.sides]
    if found.spec:
        console.table([{"field": field, **dict(zip(names, values, strict=True))} for field, values in found.spec],
                      ["field", *names], title="What differs in their specs")
    else:
        console.text("The specs are the same but for their names.")
    console.text("")
    rows = []
    for row in found.rows():
        best = found.best_of(row)
        values = [side.ends.get(row.name) for side in found.sides]
        said = [MISSING if value is None else row.say(value) for value in values]
        rows.append({"": row.label, **dict(zip(names, said, strict=True)), "better": names[best] if best is not None
                     else ""})
    console.table(rows, ["", *names, "better"], title="How they ended")
    console.text("")
    for metric, label in (("loss", "Loss by step"), ("auc", "AUC by step")):
        curves = [side.record.train[metric].kept.values if metric in side.record.train else [] for side in found.sides]
        settled = [value for curve in curves for value in list(curve)[len(curve) // 20:] if value == value]
        if settled:
            low, high = min(settled), max(settled)
            console.table([{"run": name, "curve": sparkline(curve, low, high, CURVE_WIDTH),
                            "last": format_float(curve[-1]) if len(curve) else MISSING}
                           for name, curve in zip(names, curves, strict=True)],
                          title=f"{label}: {format_float(low)} to {format_float(high)}")
            console.text("")
    for side in found.sides:
        console.text(f"{side.name}: {sentence(side.record, side.now)}", style="dim")
