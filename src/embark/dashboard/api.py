"""What the page is told of runs, besides their curves: plain values, ready to be JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from embark.dashboard.runs import Known, Run
from embark.events.events import Event
from embark.events.interruptions import losses_sentence
from embark.events.spending import spending
from embark.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_float,
    strip_control_chars,
    to_finite,
    to_one_line,
)
from embark.report.liveness import Life
from embark.report.timeline import PHASES, Story

MAX_TABLES = 400
MAX_RANKS = 1024
MAX_MARKS = 600
MAX_NOTES = 30
MAX_TEXT = 2000
STRAGGLES = 1.15
"""A rank whose step takes that much longer than the median one's is marked."""
FEW_RANKS = 16
RECENT = 20
RANK_TIMES = ("own_s", "input_s", "step_s")


def summary(run: Run, known: Known, now_s: float) -> dict[str, Any]:
    """A run in a line of the list."""
    with run.lock:
        story, life = run.story, run.life(now_s)
        step = story.step
        return {
            "id": run.id, "name": to_one_line(run.name), "uri": to_one_line(run.place.uri), "version": run.version,
            "state": life.state, "words": life.words[:MAX_TEXT], "last_s": life.last_s,
            "step": story.steps_done, "num_steps": story.num_steps,
            "loss": _shown(step, "loss"), "auc": _shown(story.eval, "auc") or _shown(step, "auc"),
            "normalized_entropy": _shown(story.eval, "normalized_entropy") or _shown(step, "normalized_entropy"),
            "samples_per_s": _shown(step, "samples_per_s"), "step_s": story.step_s,
            "seconds_left": story.seconds_left if life.state == "running" else None,
            "first_s": story.first_s, "is_sampled": run.is_sampled, "share_read": round(run.share_read, 3),
            "is_remote": run.place.is_remote, "num_bad_lines": story.num_bad_lines,
            "money": _money(run, story, life, known, now_s),
        }


def detail(run: Run, known: Known, now_s: float) -> dict[str, Any]:
    """Everything about one run that is no curve and no log."""
    told = summary(run, known, now_s)
    with run.lock:
        story = run.story
        return {
            **told,
            "about": _about(story),
            "marks": _marks(story),
            "spans": [[_since(story, begin), _since(story, end)] for begin, end in story.sessions[-MAX_MARKS:]],
            "plan": _plan(story),
            "foresight": _foresight(story),
            "phases": _phases(story),
            "ranks": _ranks(story),
            "machines": _machines(story),
            "notes": [{"time_s": event.time_s, "level": to_one_line(event.values.get("level", "")),
                       "text": strip_control_chars(event.values.get("text", ""))[:MAX_TEXT]}
                      for event in story.told if event.kind == "note"][-MAX_NOTES:],
            "evals": {name: _shown(story.eval, name)
                      for name in ("step", "auc", "normalized_entropy", "log_loss", "calibration", "best_auc",
                                   "best_log_loss", "num_samples")},
            "spec": known.without_secrets(strip_control_chars(run.spec_text)),
        }


def _shown(values: Mapping[str, Any], name: str) -> float | None:
    return to_finite(values.get(name))


def _since(story: Story, time_s: float) -> float:
    return round(time_s - (story.first_s or time_s), 3)


@lru_cache(maxsize=256)
def _price(known: Known, spec_text: str) -> tuple[float | None, str]:
    return known.usd_per_hour(spec_text)


def _money(run: Run, story: Story, life: Life, known: Known, now_s: float) -> dict[str, Any]:
    """Spent on every start so far; to go at the pace measured."""
    usd_per_hour, words = _price(known, run.spec_text) if run.spec_text else (None, "")
    spent = spending(story.told, usd_per_hour=usd_per_hour, now_s=now_s if life.state == "running" else None)
    if spent is None:
        return {"usd_per_hour": usd_per_hour, "words": words, "spent_usd": None, "to_go_usd": None, "budget_usd": None,
                "lost": ""}
    to_go = None if spent.outcome else spent.usd_for(spent.left_s)
    return {"usd_per_hour": spent.usd_per_hour, "words": words, "spent_usd": spent.usd, "to_go_usd": to_go,
            "budget_usd": spent.budget_usd, "lost": losses_sentence(spent.lost)}


def _about(story: Story) -> list[list[str]]:
    start = story.start
    device = to_one_line(start.get("device_name") or start.get("device") or "")
    world = to_finite(start.get("world_size"))
    rows = [
        ("device", f"{format_count(world)} × {device}" if device and world and world > 1 else device),
        ("engine", to_one_line(start.get("engine", ""))), ("why", to_one_line(start.get("engine_reason", ""))),
        ("precision", to_one_line(start.get("precision", ""))),
        ("batch size", format_count(start.get("batch_size"))), ("parameters", format_count(start.get("num_parameters"))),
        ("tables", format_bytes(start.get("table_bytes"))), ("training samples", format_count(start.get("num_train_samples"))),
        ("held-out samples", format_count(start.get("num_eval_samples"))),
        ("directory", to_one_line(start.get("run_dir", ""))),
    ]
    return [[name, value[:MAX_TEXT]] for name, value in rows if value and value != "–"]


_MARKED = {"start": "start", "resume": "resume", "save": "save", "eval": "eval", "interrupt": "interrupt",
           "error": "error", "end": "end"}


def _marks(story: Story) -> list[dict[str, Any]]:
    marked = [event for event in story.told if event.kind in _MARKED]
    return [{"kind": event.kind, "step": to_finite(event.values.get("step", event.values.get("first_step"))),
             "at_s": _since(story, event.time_s), "time_s": event.time_s, "words": mark_words(event)}
            for event in marked[-MAX_MARKS:]]


def mark_words(event: Event) -> str:
    """One event in a line for a person."""
    values, kind = event.values, event.kind
    step = format_count(values.get("step"))
    if kind == "start":
        return f"started at step {format_count(values.get('first_step'))} of {format_count(values.get('num_steps'))}"
    if kind == "resume":
        return f"went on from step {step}"
    if kind == "save":
        return f"checkpoint at step {step}: {format_bytes(values.get('bytes'))} in {format_duration(values.get('save_s'))}"
    if kind == "eval":
        return f"evaluated at step {step}: AUC {format_float(values.get('auc'))}, log loss {format_float(values.get('log_loss'))}"
    if kind == "interrupt":
        return f"stopped by {to_one_line(values.get('signal', ''))} at step {step}"
    if kind == "end":
        return f"ended at step {step}: {to_one_line(values.get('outcome', ''))}"
    if kind == "step":
        return (f"step {step}: loss {format_float(values.get('loss'))}, AUC {format_float(values.get('auc'))}, "
                f"{format_count(values.get('samples_per_s'))} samples/s")
    if kind == "ranks":
        return f"step {step}: {_ranks_words(values)}"
    if kind == "phases" and isinstance(values.get("seconds"), Mapping):
        parts = {to_one_line(name): to_finite(seconds) for name, seconds in values["seconds"].items()}
        told = ", ".join(f"{name} {duration_ms(seconds)}" for name, seconds in parts.items() if seconds)
        return f"step {step}: {told}"
    if kind in ("error", "note"):
        return strip_control_chars(values.get("text", ""))[:MAX_TEXT]
    if kind == "plan":
        tables = values.get("tables")
        return f"{len(tables) if isinstance(tables, list) else 0} tables placed"
    if kind == "predict":
        return f"expects {format_duration(values.get('step_s'))} a step and {format_bytes(values.get('peak_bytes'))}"
    return ", ".join(f"{to_one_line(name)} {to_one_line(value)[:80]}" for name, value in list(values.items())[:8])


def _ranks_words(values: Mapping[str, Any]) -> str:
    told = values.get("step_s")
    times = [seconds for seconds in map(to_finite, told) if seconds is not None] if isinstance(told, list) else []
    systems = values.get("systems")
    gpus = [gpu for system in (systems if isinstance(systems, list) else ()) if isinstance(system, Mapping)
            for gpu in _gpus(system)]
    busy = [percent for percent in (to_finite(gpu.get("util_percent")) for gpu in gpus) if percent is not None]
    parts = []
    if times:
        slowest = max(range(len(times)), key=times.__getitem__)
        parts.append(f"median {duration_ms(float(np.median(times)))}")
        parts.append(f"slowest rank {slowest} {duration_ms(times[slowest])}")
    if busy:
        parts.append(f"GPUs {sum(busy) / len(busy):.0f} % busy")
    return "; ".join(parts) or "nothing measured"


def duration_ms(seconds: float) -> str:
    """A short time, as one reads a step's."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else format_duration(seconds)


def _plan(story: Story) -> dict[str, Any] | None:
    tables = story.plan.get("tables")
    if not isinstance(tables, list) or not tables:
        return None
    read: list[dict[str, Any]] = [
        {"table": to_one_line(table.get("table", ""))[:200], "rows": to_finite(table.get("rows")),
         "dim": to_finite(table.get("dim")), "sharding": to_one_line(table.get("sharding", ""))[:80],
         "kernel": to_one_line(table.get("kernel", ""))[:80], "bytes": to_finite(table.get("bytes")) or 0.0,
         "ranks": [int(rank) for rank in map(to_finite, table.get("ranks") or ()) if rank is not None][:MAX_RANKS]}
        for table in tables if isinstance(table, Mapping)
    ]
    read.sort(key=lambda table: -table["bytes"])
    per_rank = story.plan.get("per_rank")
    ranks = [{"rank": int(to_finite(rank.get("rank")) or 0), "bytes": to_finite(rank.get("bytes")) or 0.0}
             for rank in (per_rank if isinstance(per_rank, list) else ()) if isinstance(rank, Mapping)]
    return {"tables": read[:MAX_TABLES], "num_tables": len(read), "per_rank": ranks[:MAX_RANKS],
            "room_bytes": _gpu_bytes(story), "gpus": _gpu_rooms(story)}


def _gpu_bytes(story: Story) -> float | None:
    rooms = [to_finite(gpu.get("total_bytes")) for system in story.systems for gpu in _gpus(system)]
    known = [room for room in rooms if room]
    return min(known) if known else None


def _gpu_rooms(story: Story) -> list[dict[str, float]]:
    """What each GPU holds and could hold, in the order of hosts; none where one of them does not say."""
    told = [(to_finite(gpu.get("used_bytes")), to_finite(gpu.get("total_bytes")))
            for system in story.systems for gpu in _gpus(system)]
    rooms = [{"used_bytes": used, "total_bytes": total} for used, total in told if used is not None and total]
    return rooms[:MAX_RANKS] if len(rooms) == len(told) else []


def _gpus(system: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    gpus = system.get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, Mapping)] if isinstance(gpus, list) else []


def _foresight(story: Story) -> dict[str, Any] | None:
    if not story.predict:
        return None
    used = [to_finite(gpu.get("used_bytes")) for system in story.systems for gpu in _gpus(system)]
    peak = to_finite(story.end.get("peak_bytes")) or max((b for b in used if b), default=None)
    return {
        "is_calibrated": bool(story.predict.get("is_calibrated")),
        "bound_by": to_one_line(story.predict.get("bound_by", ""))[:200],
        "rows": [
            {"name": "step time", "unit": "s", "predicted": to_finite(story.predict.get("step_s")), "fact": story.step_s},
            {"name": "memory", "unit": "B", "predicted": to_finite(story.predict.get("peak_bytes")), "fact": peak},
        ],
    }


def _phases(story: Story) -> dict[str, float] | None:
    recent = story.phases.last(RECENT)
    found = {name: recent[name][np.isfinite(recent[name])] for name in PHASES}
    return {name: float(values.mean()) for name, values in found.items() if len(values)} or None


def _ranks(story: Story) -> list[dict[str, Any]]:
    """Each rank's usual times of late and, where the others wait for it, what theirs are."""
    recent = story.ranks.last(RECENT) | story.own.last(RECENT)

    def usual(name: str) -> float | None:
        values = recent.get(name, np.empty(0))
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else None

    ranks = sorted({int(name.rpartition(".")[2]) for name in (*story.ranks.names, *story.own.names)})[:MAX_RANKS]
    told: list[dict[str, Any]] = [
        {"rank": rank, **{name: usual(f"{name}.{rank}") for name in RANK_TIMES}, "straggles": {}} for rank in ranks
    ]
    steps = [one["step_s"] for one in told if one["step_s"] is not None]
    # a wait of microseconds may be twice the others' and matter to nobody
    least_s = 0.05 * float(np.median(steps)) if steps else 0.0
    for name in RANK_TIMES:
        known = [one for one in told if one[name] is not None]
        middle = float(np.median([one[name] for one in known])) if known else 0.0
        for one in known if len(known) > 1 else []:
            # of a few ranks, a slow one moves the median itself
            others = middle if len(known) > FEW_RANKS else float(np.median([r[name] for r in known if r is not one]))
            if one[name] > STRAGGLES * others and one[name] - others > least_s:
                one["straggles"][name] = others
    return told


def _machines(story: Story) -> list[dict[str, Any]]:
    return [
        {"host": to_one_line(system.get("host", ""))[:200],
         **{name: to_finite(system.get(name)) for name in ("cpu_percent", "resident_bytes", "host_used_bytes",
                                                        "host_bytes")},
         "gpus": [{name: to_finite(gpu.get(name)) for name in ("index", "util_percent", "used_bytes", "total_bytes",
                                                            "power_w", "temperature_c")}
                  for gpu in _gpus(system)[:MAX_RANKS]]}
        for system in story.systems[:MAX_RANKS]
    ]


def clock_words(time_s: float) -> str:
    """`11-15 09:15:00`, as this machine's clock shows it; empty where there is no such time."""
    try:
        return time.strftime("%m-%d %H:%M:%S", time.localtime(time_s))
    except (ValueError, OverflowError, OSError):
        return ""
