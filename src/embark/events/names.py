"""What is measured: each name once, with its unit, what it means, which way is better and where events have it.

TensorBoard's tags, Prometheus' names, Grafana's panels, CloudWatch, OTLP and docs/metrics.md are all made from this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured quantity, named as it stands in events and in TensorBoard."""

    name: str
    unit: str
    """Empty for a plain number."""
    meaning: str
    better: Literal["up", "down"] | None
    """`None` where neither way is."""
    label: str
    """What people read."""
    paths: tuple[str, ...]
    """Where events have it: `step.loss` is the value `loss` of `step` events. `ranks.systems[host].gpus[gpu].power_w`
    goes through lists or maps whose places are told apart by the labels in brackets. `#save` counts events."""
    group: str
    """The heading it stands under."""
    kind: Kind = "gauge"
    """A counter only grows."""

    @property
    def labels(self) -> tuple[str, ...]:
        """What tells its several values in one run apart; `split` is `train` or `eval`."""
        inner = tuple(part.partition("]")[0] for part in self.paths[0].split("[")[1:])
        return ("split", *inner) if self.has_splits else inner

    @property
    def has_splits(self) -> bool:
        return {path.partition(".")[0] for path in self.paths} >= {"step", "eval"}


LEARNING, PACE, STEP, MACHINE, GPU, SAFETY, RUN = (
    "Learning", "Pace", "Where a step's time goes", "Machines", "GPUs", "Checkpoints and interruptions", "The run",
)
GROUPS = (LEARNING, PACE, STEP, MACHINE, GPU, SAFETY, RUN)


def _of_machine(field: str) -> tuple[str, ...]:
    return (f"ranks.systems[host].{field}",)


def _of_gpu(field: str) -> tuple[str, ...]:
    return (f"ranks.systems[host].gpus[gpu].{field}",)


METRICS: tuple[Metric, ...] = (
    Metric("loss", "nats", "what training makes small, a mean since the last point", "down", "loss",
           ("step.loss",), LEARNING),
    Metric("auc", "", "how often a positive outranks a negative", "up", "AUC", ("step.auc", "eval.auc"), LEARNING),
    Metric("normalized_entropy", "", "log loss, over that of guessing the mean rate", "down", "normalized entropy",
           ("step.normalized_entropy", "eval.normalized_entropy"), LEARNING),
    Metric("log_loss", "nats", "surprise at the labels, a mean per sample", "down", "log loss",
           ("step.log_loss", "eval.log_loss"), LEARNING),
    Metric("calibration", "", "predicted positives over real ones; 1 is right", None, "calibration",
           ("step.calibration", "eval.calibration"), LEARNING),
    Metric("best_auc", "", "the AUC of the true probabilities on these samples", "up", "best possible AUC",
           ("eval.best_auc",), LEARNING),
    Metric("best_log_loss", "nats", "the log loss of the true probabilities", "down", "best possible log loss",
           ("eval.best_log_loss",), LEARNING),
    Metric("learning_rate", "", "how far one step goes", None, "learning rate", ("step.learning_rate",), LEARNING),
    Metric("samples_per_s", "samples/s", "samples trained on per second, all ranks together", "up", "rate",
           ("step.samples_per_s",), PACE),
    Metric("step_s", "s", "one training step, a mean since the last point", "down", "step time",
           ("step.step_s",), PACE),
    Metric("input_s", "s", "of a step of rank 0, what it waited for its batch", "down", "wait for input",
           ("step.input_s",), PACE),
    Metric("predicted_step_s", "s", "the step that was foreseen for this machine", "down", "predicted step time",
           ("predict.step_s",), PACE),
    Metric("rank_step_s", "s", "a rank's own step: less its wait for the others to agree on the next one", "down",
           "step time by rank", ("ranks.step_s[rank]",), PACE),
    Metric("rank_input_s", "s", "of a rank's step, what it waited for its batch", "down", "wait for input by rank",
           ("ranks.input_s[rank]",), PACE),
    Metric("eval_s", "s", "one pass over the held-out samples", "down", "evaluation time", ("eval.eval_s",), PACE),
    Metric("train_s", "s", "training proper: no evaluation, no saving", "down", "training time",
           ("end.train_s",), PACE),
    Metric("phase_s", "s", "of a step, a mean over ranks: input, copy, lookup, all_to_all (all that ranks send each "
           "other), dense, optimizer, other", "down", "time by phase", ("phases.seconds[phase]",), STEP),
    Metric("rank_own_s", "s", "a rank's step in a look at its phases, less all that it sent or waited for", "down",
           "own time by rank", ("phases.own_s[rank]",), STEP),
    Metric("cpu_percent", "%", "processors at work", None, "processors", _of_machine("cpu_percent"), MACHINE),
    Metric("resident_bytes", "B", "memory of the machine's first rank", "down", "memory of a rank",
           _of_machine("resident_bytes"), MACHINE),
    Metric("host_used_bytes", "B", "the machine's memory in use", "down", "memory in use",
           _of_machine("host_used_bytes"), MACHINE),
    Metric("host_bytes", "B", "the machine's memory", None, "memory", _of_machine("host_bytes"), MACHINE),
    Metric("net_in_bytes_per_s", "B/s", "received from other machines, RDMA too", None, "network in",
           _of_machine("net_in_bytes_per_s"), MACHINE),
    Metric("net_out_bytes_per_s", "B/s", "sent to other machines, RDMA too", None, "network out",
           _of_machine("net_out_bytes_per_s"), MACHINE),
    Metric("disk_read_bytes_per_s", "B/s", "read from disks", None, "disk read",
           _of_machine("disk_read_bytes_per_s"), MACHINE),
    Metric("disk_write_bytes_per_s", "B/s", "written to disks", None, "disk write",
           _of_machine("disk_write_bytes_per_s"), MACHINE),
    Metric("gpu_util_percent", "%", "time in which a kernel ran", "up", "GPU utilization",
           _of_gpu("util_percent"), GPU),
    Metric("gpu_used_bytes", "B", "GPU memory in use", "down", "GPU memory in use", _of_gpu("used_bytes"), GPU),
    Metric("gpu_total_bytes", "B", "GPU memory", None, "GPU memory", _of_gpu("total_bytes"), GPU),
    Metric("gpu_power_w", "W", "power drawn", None, "GPU power", _of_gpu("power_w"), GPU),
    Metric("gpu_temperature_c", "°C", "temperature", "down", "GPU temperature", _of_gpu("temperature_c"), GPU),
    Metric("save_s", "s", "writing one checkpoint", "down", "save time", ("save.save_s",), SAFETY),
    Metric("pause_s", "s", "of that, what training stood still", "down", "pause for a save",
           ("save.pause_s",), SAFETY),
    Metric("save_bytes", "B", "a checkpoint's size", "down", "checkpoint size", ("save.bytes",), SAFETY),
    Metric("saved_step", "", "the step of the last checkpoint", "up", "saved step", ("save.step",), SAFETY),
    Metric("num_saves", "", "checkpoints that were written", None, "checkpoints", ("#save",), SAFETY, "counter"),
    Metric("num_resumes", "", "times the run went on from a checkpoint", "down", "resumes", ("#resume",), SAFETY,
           "counter"),
    Metric("num_interrupts", "", "times the run was told to stop", "down", "interruptions", ("#interrupt",), SAFETY,
           "counter"),
    Metric("num_errors", "", "times the run ended by an error", "down", "errors", ("#error",), SAFETY, "counter"),
    Metric("last_step", "", "steps that are done", "up", "steps done", ("step.step", "start.first_step"), RUN),
    Metric("num_steps", "", "steps that were asked for", None, "steps", ("start.num_steps",), RUN),
    Metric("world_size", "", "ranks that train together", None, "ranks", ("start.world_size",), RUN),
    Metric("peak_bytes", "B", "the most that rank 0 held of its device", "down", "peak memory",
           ("end.peak_bytes",), RUN),
    Metric("usd_per_hour", "USD/h", "what the machines cost", "down", "price", ("start.usd_per_hour",), RUN),
    Metric("spent_usd", "USD", "what the machines had cost at the end of the run", "down", "spent",
           ("end.spent_usd",), RUN),
    Metric("is_running", "", "1 from the first event of a start to its end, else 0", None, "is running",
           ("@running",), RUN),
    Metric("last_event_s", "s", "when the last event was told, since 1970", None, "last event", ("@time",), RUN),
)

_BY_NAME = {metric.name: metric for metric in METRICS}


def find(name: str) -> Metric | None:
    """The metric of this name; `None` for a value that is not one, such as `step` or `path`."""
    return _BY_NAME.get(name)


def metric(name: str) -> Metric:
    """The metric of this name, which there must be."""
    return _BY_NAME[name]
