"""When someone should be woken: rules for Prometheus, made from the list of metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from embark.events.names import metric
from embark.events.sinks.prometheus import RUN, prometheus_name

IDLE_PERCENT = 5
IDLE_MINUTES = 30
"""Longer than a checkpoint, an evaluation and a restart take."""
STALLED_MINUTES = 15
SLOW_RANK = 1.3
"""Times the median of all ranks."""
INPUT_SHARE = 0.3
"""Of a step, what waiting for data may take."""
SLOW_STEP = 2.0
"""Times what was foreseen."""
SAVE_HOURS = 6
HOT_C = 88
FULL = 0.95
"""Of a machine's memory."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule."""

    name: str
    expression: str
    minutes: int
    """How long it must hold."""
    severity: Literal["critical", "warning"]
    what: str
    """What happens, and what to do."""


def alerts() -> tuple[Alert, ...]:
    """All of them."""
    running = f"on ({RUN}) {_name('is_running')} == 1"
    saved, last = _name("saved_step"), _name("last_step")
    mean_gpu, step, slowest = _name("gpu_util_percent"), _name("step_s"), _name("rank_step_s")
    return (
        Alert("EmbarkLossIsNoNumber", f"{_name('loss')} != {_name('loss')}", 0, "critical",
              "The loss is no number, and never becomes one again: a smaller train.learning_rate, or some "
              "train.warmup_steps."),
        Alert("EmbarkRunFailed", f"increase({_name('num_errors')}[10m]) > 0", 0, "critical",
              "The run ended by an error: `embark diagnose` says which."),
        Alert("EmbarkStalled", f"(time() - {_name('last_event_s')}) > {STALLED_MINUTES * 60} and {running}", 0,
              "critical", f"The run has told nothing for {STALLED_MINUTES} minutes and has not ended: a rank hangs, or "
              "the machine is gone."),
        Alert("EmbarkIdleGpus", f"avg by ({RUN}) ({mean_gpu}) < {IDLE_PERCENT / 100} and {running}", IDLE_MINUTES,
              "critical", "Machines are paid for and do not train."),
        Alert("EmbarkSlowRank",
              f"max by ({RUN}) ({slowest}) > {SLOW_RANK} * quantile by ({RUN}) (0.5, {slowest}) "
              f"and count by ({RUN}) ({slowest}) > 2", 10, "warning",
              "One rank is slower than the others, and all wait for it in every step."),
        Alert("EmbarkWaitsForInput",
              f"max by ({RUN}) ({_name('rank_input_s')}) > on ({RUN}) {INPUT_SHARE} * {step}", 10, "warning",
              "The loader, not the device, sets the pace: data nearer by, or prepared."),
        Alert("EmbarkSlowerThanPredicted", f"{step} > {SLOW_STEP:g} * {_name('predicted_step_s')}", 30, "warning",
              "A step takes more than twice what was foreseen: the loader, another process or the network holds it "
              "back."),
        Alert("EmbarkNoCheckpoint",
              f"(changes({saved}[{SAVE_HOURS}h]) == 0 or on ({RUN}) ({last} unless on ({RUN}) {saved})) "
              f"and on ({RUN}) ({last} offset {SAVE_HOURS}h) and {running}", 0, "warning",
              f"No checkpoint was written for {SAVE_HOURS} hours: an interruption now would cost all of them."),
        Alert("EmbarkMemoryFull", f"{_name('host_used_bytes')} / {_name('host_bytes')} > {FULL}", 5, "warning",
              "A machine is about to kill what runs on it for want of memory."),
        Alert("EmbarkHotGpu", f"{_name('gpu_temperature_c')} > {HOT_C}", 10, "warning",
              "A GPU is hot and lowers its clock: every rank waits for it."),
    )


def rules_text() -> str:
    """A file for Prometheus' `rule_files`."""
    import yaml

    rules: list[dict[str, Any]] = [
        {"alert": one.name, "expr": one.expression, "for": f"{one.minutes}m", "labels": {"severity": one.severity},
         "annotations": {"summary": f"{{{{ $labels.{RUN} }}}}: {one.what}"}}
        for one in alerts()
    ]
    held = {"groups": [{"name": "embark", "rules": rules}]}
    return str(yaml.safe_dump(held, sort_keys=False, width=120, allow_unicode=True))


def _name(name: str) -> str:
    return prometheus_name(metric(name))
