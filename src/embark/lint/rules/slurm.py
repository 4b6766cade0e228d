"""EMB96x: batch scripts of Slurm."""

import re
from collections.abc import Iterator

from embark.kubernetes.yaml_nodes import SourceFile, Span
from embark.lint.manifests import Manifests
from embark.lint.rule import Hit, Hits
from embark.values import frozen

_OPTION = re.compile(r"^#SBATCH[ \t]+(-[a-zA-Z]|--[a-z-]+)(?:[= \t]+(\S+))?", re.MULTILINE)
_LONG = {"-t": "--time", "-p": "--partition", "-n": "--ntasks"}
_TRAINS = re.compile(r"\btorchrun\b|torch\.distributed\.run\b|\bembark train\b")
_PREEMPTIBLE = re.compile(r"spot|preempt|scaveng|backfill", re.IGNORECASE)
_NO_LIMIT = re.compile(r"(?:[0:-]+|infinite|unlimited)", re.IGNORECASE)


@frozen
class BatchScript:
    """A script for `sbatch` that trains, and its options by their long names."""

    source: SourceFile
    options: dict[str, tuple[str, Span]]

    @property
    def location(self) -> Span:
        return min((span for _, span in self.options.values()), key=lambda span: span.start)


def batch_scripts(manifests: Manifests) -> Iterator[BatchScript]:
    for source in manifests.files.sources:
        found = {_LONG.get(match[1], match[1]): (match[2] or "", Span(source, *match.span()))
                 for match in _OPTION.finditer(source.text)}
        if found and _TRAINS.search(source.text):
            yield BatchScript(source, found)


def torchrun_in_every_task(batch: BatchScript) -> Hits:
    num_tasks, where = batch.options.get("--ntasks-per-node", ("1", batch.location))
    num_ranks = re.search(r"--nproc[-_]per[-_]node[= ](\S+)", batch.source.text)
    if num_tasks != "1" and num_ranks and num_ranks[1] != "1":
        yield Hit(where, f"{num_tasks} tasks of each node start {num_ranks[1]} ranks each")


def batch_without_signal(batch: BatchScript) -> Hits:
    if "--signal" not in batch.options:
        yield Hit(batch)


def batch_without_requeue(batch: BatchScript) -> Hits:
    partition, where = batch.options.get("--partition", ("", batch.location))
    if "--requeue" not in batch.options and _PREEMPTIBLE.search(partition):
        yield Hit(where, f"no --requeue on the partition {partition}")


def batch_without_limit(batch: BatchScript) -> Hits:
    value, where = batch.options.get("--time", ("", batch.location))
    if _NO_LIMIT.fullmatch(value):
        yield Hit(where, f"--time={value} is no limit")
