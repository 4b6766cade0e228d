"""What the page shows of runs, besides their curves: plain values, ready to be JSON."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

import numpy as np

from embark.events.events import Event, changes_of, parse_event, warm_start_text
from embark.events.metrics import task_rows
from embark.events.sinks.prometheus import exposition
from embark.events.spending import losses_sentence
from embark.events.summary import HELD_OUT, best_checkpoint
from embark.events.traffic import TrafficRecord, TrafficView
from embark.formatting import (
    CUT,
    format_auc,
    format_bytes,
    format_count,
    format_duration,
    format_float,
    format_si,
    format_step_time,
    pluralize,
    redact,
    strip_control_chars,
    to_finite,
    to_one_line,
)
from embark.report.figures import MAX_RANKS, list_of, phase_means, placement_of, prediction_of, rank_times
from embark.report.record import GPU, HOST, Record, gpus_of
from embark.store import EVENTS
from embark.values import JsonDict, JsonMap
from .runs import Runs, WatchedRun

MAX_MARKS = 600
MAX_NOTES = 30
MAX_TEXT = 2000
MAX_METRICS_RUNS = 100
MARKED = frozenset({"start", "resume", "warm_start", "change", "save", "eval", "interrupt", "error", "end"})
MAX_LINES = 500
MAX_LINE_CHARS = 2000
MAX_READ_BYTES = 32 << 20  # A filter searches no further back from the end of a file.
MAX_EVENT_BYTES = 8 << 20  # Events are slower to show.
PIECE_BYTES = 1 << 20
_LEVELS = {"error": ("error", "fatal", "critical", "traceback", "exception"), "warning": ("warn",)}


def summary(run: WatchedRun, now_s: float) -> JsonDict:
    """Return a run as a line of the list."""
    with run.lock:
        record, status = run.record, run.status(now_s)
        step, held = record.step, record.held_out
        return {
            "id": run.id, "name": to_one_line(run.name), "uri": to_one_line(run.files.uri), "version": run.version,
            "state": status.state, "sentence": status.sentence[:MAX_TEXT], "last_s": status.last_s,
            "step": record.steps_done, "num_steps": record.num_steps, "loss": to_finite(step.get("loss")),
            **{name: to_finite(step.get(name)) for name in ("auc", "normalized_entropy")},  # as the loss: training
            "auc_text": format_auc(step),
            **{f"eval_{name}": to_finite(held.get(name)) for name in ("auc", "normalized_entropy")},
            "samples_per_s": to_finite(step.get("samples_per_s")), "step_s": record.step_s,
            "seconds_left": record.seconds_left if status.state == "running" else None,
            "first_s": record.first_s, "share_read": round(run.share_read, 3),
            "serving": _serving(record.traffic),
            "is_remote": run.files.is_remote, "num_bad_lines": record.num_bad_lines, "money": _money(run, now_s)
        }


def _serving(traffic: TrafficRecord) -> JsonDict | None:
    """Return a server in the list, and its figures."""
    if not traffic:
        return None
    view, figures = TrafficView([traffic]), traffic.metrics()
    p50, p95, p99 = view.latency_s()
    worst = view.columns[0].drift if view.columns else None
    calibration = view.calibration
    return {"text": traffic.sentence(), "figures": [
        ["Requests", f"{format_si(figures['requests_per_s'])}/s", f"{format_si(figures['rows_per_s'])} rows/s"],
        ["p99", format_step_time(p99), f"p50 {format_step_time(p50)}, p95 {format_step_time(p95)}"],
        ["Version", str(traffic.version), to_one_line(traffic.model)],
        ["Worst column", f"PSI {worst.psi:.2f}" if worst and worst.num else "–",
         view.columns[0].column.title if worst and worst.num else "no rows counted yet"],
        ["Predicted / observed", f"{calibration.ratio:.2f}" if calibration and calibration.ratio else "–",
         pluralize(calibration.num, "label") if calibration else "no labels yet"]]}


def detail(run: WatchedRun, now_s: float) -> JsonDict:
    """Return everything about one run except curves and logs."""
    with run.lock:
        record = run.record
        return {
            **summary(run, now_s),
            "about": _about(record, run.held_by()),
            "marks": _marks(record),
            "spans": [[_since_start(record, one.start_s), _since_start(record, one.last_s)]
                      for one in record.attempts()[-MAX_MARKS:]],
            "plan": placement_of(record),
            "prediction": prediction_of(record),
            "phases": phase_means(record),
            "ranks": rank_times(record),
            "machines": _machines(record),
            "notes": [{"time_s": event.time_s, "level": to_one_line(event.values.get("level", "")),
                       "text": strip_control_chars(event.values.get("text", ""))[:MAX_TEXT]}
                      for event in record.of_kind("note")[-MAX_NOTES:]],
            "evals": {name: to_finite(record.held_out.get(name))
                      for name in ("step", "num_samples", *HELD_OUT, "best_auc", "best_log_loss")},
            "tasks": [asdict(row) for row in task_rows(record.held_out, record.step)],
            "spec": redact(strip_control_chars(run.spec_text)),
            "tuning": run.tune.shown
        }


def metrics_text(runs: Runs) -> str:
    """Return the newest metrics of all runs as Prometheus fetches them; two runs of one name differ by their id."""
    shown = runs.all()[:MAX_METRICS_RUNS]
    names = [run.name for run in shown]
    return exposition({run.name if names.count(run.name) == 1 else f"{run.name} {run.id}": _newest_events(run)
                       for run in shown})


def event_text(event: Event) -> str:
    """Return one event in a line."""
    values = event.values
    if event.kind not in _TEXTS:
        fields = list(values.items())[:8]
        return ", ".join(f"{to_one_line(name)} {to_one_line(value)[:80]}" for name, value in fields)
    return _TEXTS[event.kind](values, f"step {format_count(values.get('step'))}")


def clock_text(time_s: float) -> str:
    """Format a time as `11-15 09:15:00` by this machine's clock; empty where there is no such time."""
    try:
        return time.strftime("%m-%d %H:%M:%S", time.localtime(time_s))
    except (ValueError, OverflowError, OSError):
        return ""


Values = JsonMap


def _ranks_text(values: Values, step: str) -> str:
    times = [seconds for seconds in map(to_finite, list_of(values.get("step_s"))) if seconds is not None]
    busy = [percent for system in list_of(values.get("systems")) if isinstance(system, Mapping)
            for gpu in gpus_of(system) if (percent := to_finite(gpu.get("util_percent"))) is not None]
    parts = []
    if times:
        slowest = int(np.argmax(times))
        parts += [f"median {format_step_time(float(np.median(times)))}",
                  f"slowest rank {slowest} {format_step_time(times[slowest])}"]
    if busy:
        parts.append(f"GPUs {sum(busy) / len(busy):.0f} % busy")
    return f"{step}: {'; '.join(parts) or 'nothing measured'}"


def _phases_text(values: Values, step: str) -> str:
    seconds = values.get("seconds")
    parts = {to_one_line(name): to_finite(value) for name, value in seconds.items()} \
        if isinstance(seconds, Mapping) else {}
    return f"{step}: {', '.join(f'{name} {format_step_time(value)}' for name, value in parts.items() if value)}"


def _plain_text(values: Values, _step: str) -> str:
    return strip_control_chars(values.get("text", ""))[:MAX_TEXT]


_TEXTS: dict[str, Callable[[Values, str], str]] = {
    "begin": lambda v, _: "began to load",
    "start": lambda v, _: f"started at step {format_count(v.get('first_step'))} of {format_count(v.get('num_steps'))}",
    "resume": lambda v, step: f"resumed from {step}",
    "warm_start": lambda v, _: f"warm start with the weights {warm_start_text(v)}",
    "change": lambda v, _: ", ".join(map(str, changes_of([Event("change", v)]))),
    "save": lambda v, step: f"checkpoint at {step}: {format_bytes(v.get('bytes'))} in "
                            f"{format_duration(v.get('save_s'))}",
    "eval": lambda v, step: f"evaluated at {step}: held-out AUC {format_float(v.get('auc'))}, "
                            f"held-out log loss {format_float(v.get('log_loss'))}",
    "interrupt": lambda v, step: f"interrupted by {to_one_line(v.get('signal', ''))} at {step}",
    "end": lambda v, step: f"ended at {step}: {to_one_line(v.get('outcome', ''))}",
    "step": lambda v, step: f"{step}: training loss {format_float(v.get('loss'))}, training AUC {format_auc(v)}, "
                            f"{format_count(v.get('samples_per_s'))} samples/s",
    "plan": lambda v, _: f"{len(list_of(v.get('tables')))} tables placed",
    "predict": lambda v, _: f"predicted {format_duration(v.get('step_s'))} a step and "
                            f"{format_bytes(v.get('peak_bytes'))}",
    "serve": lambda v, _: f"version {format_count(v.get('version'))} answers",
    "traffic": lambda v, _: f"version {format_count(v.get('version'))}: {format_count(v.get('rows'))} rows"
                            + (f", {format_si(v['requests_per_s'])} requests/s" if "requests_per_s" in v else ""),
    "version_refused": lambda v, _: f"version {format_count(v.get('version'))} is refused: "
                                    f"{to_one_line(v.get('why', ''))}"[:MAX_TEXT],
    "serve_end": lambda v, _: "the server ended",
    "ranks": _ranks_text, "phases": _phases_text, "error": _plain_text, "note": _plain_text
}


def _newest_events(run: WatchedRun) -> list[Event]:
    with run.lock:
        record = run.record
        systems = [Event("ranks", {"systems": list(record.systems)}, time_s=record.last_s or 0.0)]
        served = [Event("traffic", record.traffic.metrics(), time_s=record.last_s or 0.0)] if record.traffic else []
        return [*record.milestones, *(systems if record.systems else []), *served]


def _since_start(record: Record, time_s: float) -> float:
    return round(time_s - (record.first_s or time_s), 3)


def _money(run: WatchedRun, now_s: float) -> JsonDict:
    """Return what was spent in every attempt so far, and what is to go at the pace measured."""
    price, spent = run.price(), run.spent(now_s)
    return {
        "usd_per_hour": spent.usd_per_hour if spent else price.usd_per_hour, "price": price.text,
        "spent_usd": spent.usd if spent else None, "budget_usd": spent.budget_usd if spent else None,
        "to_go_usd": spent.usd_for(spent.left_s) if spent and not spent.outcome else None,
        "lost": losses_sentence(spent.lost) if spent else ""
    }


def _about(record: Record, held_by: str) -> list[list[str]]:
    start, served = record.start, record.traffic
    device = to_one_line(start.get("device_name") or start.get("device") or "")
    world = to_finite(start.get("world_size"))
    rows = [
        ("device", f"{format_count(world)} × {device}" if device and world and world > 1 else device),
        ("engine", to_one_line(start.get("engine", ""))), ("why", to_one_line(start.get("engine_reason", ""))),
        ("precision", to_one_line(start.get("precision", ""))),
        ("batch size", format_count(start.get("batch_size"))),
        ("parameters", format_count(start.get("num_parameters"))),
        ("tables", format_bytes(start.get("table_bytes"))),
        ("training samples", format_count(start.get("num_train_samples"))),
        ("held-out samples", format_count(start.get("num_eval_samples"))),
        ("best checkpoint", best_checkpoint(record.end)),
        ("directory", to_one_line(start.get("run_dir", ""))), ("held by", held_by), ("serves", served.model),
        ("exported model", served.uri), ("address", served.url)
    ]
    return [[name, value[:MAX_TEXT]] for name, value in rows if value and value != "–"]


def _marks(record: Record) -> list[JsonDict]:
    marked = [event for event in record.milestones if event.kind in MARKED]
    return [{"kind": event.kind, "step": to_finite(event.values.get("step", event.values.get("first_step"))),
             "at_s": _since_start(record, event.time_s), "time_s": event.time_s, "text": event_text(event)}
            for event in marked[-MAX_MARKS:]]


def _machines(record: Record) -> list[JsonDict]:
    return [
        {"host": to_one_line(system.get("host", ""))[:200],
         **{name: to_finite(system.get(name)) for name in HOST[:4]},
         "gpus": [{name: to_finite(gpu.get(name)) for name in ("index", *GPU)} for gpu in gpus_of(system)[:MAX_RANKS]]}
        for system in record.systems[:MAX_RANKS]
    ]


def log_lines(run: WatchedRun, *, file: int, words: str) -> JsonDict:
    """Return the newest lines that hold all words, in any case. `file` 0 is the events, others the run's logs in
    order."""
    logs = run.files.logs()
    name = EVENTS if file <= 0 or file > len(logs) else logs[file - 1].name
    wanted = words.lower().split()
    found: deque[JsonDict] = deque()
    below = b""  # The line after this one.
    for line in _lines_backward(run, name, MAX_EVENT_BYTES if name == EVENTS else MAX_READ_BYTES):
        shown = _event_line(line) if name == EVENTS else {"text": line.decode("utf-8", "replace")}
        if b"-----END " in below and b"PRIVATE KEY" in below and not line.startswith(b"---"):
            shown["text"] = CUT  # the key's last line, which may be too short to be known by its form
        below = line
        text = shown["text"].lower()
        if not text.strip() or not all(word in text or word == shown.get("kind") for word in wanted):
            continue
        shown["text"] = redact(strip_control_chars(shown["text"][:2 * MAX_LINE_CHARS]))[:MAX_LINE_CHARS]
        if not all(word in shown["text"].lower() or word == shown.get("kind") for word in wanted):
            continue  # what is not shown is not found either
        shown.setdefault("level", _level(text))
        found.appendleft(shown)
        if len(found) >= MAX_LINES:
            break
    names = [strip_control_chars(log.name) for log in logs]
    return {"file": 0 if name == EVENTS else file, "files": ["events", *names], "lines": list(found)}


def _event_line(line: bytes) -> JsonDict:
    event = parse_event(line)
    if event is None:
        return {"text": line.decode("utf-8", "replace"), "kind": "unread", "time": ""}
    level = "error" if event.kind == "error" else str(event.values.get("level", "")) if event.kind == "note" else ""
    return {"text": event_text(event), "kind": strip_control_chars(event.kind)[:40], "time": clock_text(event.time_s),
            "level": level if level in ("warning", "error") else ""}


def _level(text: str) -> str:
    return next((level for level, signs in _LEVELS.items() if any(sign in text for sign in signs)), "")


def _lines_backward(run: WatchedRun, name: str, max_bytes: int) -> Iterator[bytes]:
    """Yield the newest line first, read a piece at a time."""
    end = run.files.size_bytes(name) or 0
    least = max(0, end - max_bytes)
    rest = b""
    while end > least:
        start = max(least, end - PIECE_BYTES)
        piece = run.files.read(name, start, end - start)
        first, *lines = (piece + rest).split(b"\n")
        yield from reversed(lines)
        rest, end = first[-PIECE_BYTES:], start
        if not piece:
            return
    if least == 0:
        yield rest

