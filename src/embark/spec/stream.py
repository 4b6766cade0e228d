"""`[stream]`: the rows without end that `embark follow` trains on."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from embark.errors import Mistakes, conflict
from .section import Names, PositiveInt, Section
from .user_code import CUSTOM_KIND, is_custom

if TYPE_CHECKING:
    from .run import RunSpec


class StreamSpec(Section):
    """`[stream]`: the records that `embark follow` trains on, one row each, as JSON objects (docs/guides/follow.md).
    Their columns become ids and dense values as those of `data.path` did."""

    source: Literal["", "files", "kafka", "nats"] | Annotated[str, Field(pattern=CUSTOM_KIND, max_length=200)] = ""
    """`files`: a folder or an object-store prefix that grows. `kafka`: topics. `nats`: subjects of JetStream.
    `my_stream:Source`: the class `Source` of `my_stream.py` beside the spec, whose code is run."""
    code: str = Field(default="", max_length=1_000_000)
    """The text of that file, which travels with the spec; read from the file if empty."""
    path: str = ""
    """`files`: the folder or its URI. JSON Lines, CSV and Parquet files are read in the order of their names; each
    must appear whole. A relative path goes by the spec's own folder; given with `--set`, by the current directory."""
    late_files: Literal["read", "report"] = "read"
    """`files`: what becomes of a file that appears with a name before the last one read, and of rows that are added to
    a file that was read: they are trained next, or they are counted and named in a warning and in
    `dead_letters.jsonl`."""
    servers: Names = ()
    """`kafka`: `host:port` of brokers. `nats`: `nats://host:port`. Options of the client, credentials among them, are
    in the TOML file that `EMBARK_STREAM_OPTIONS` names. Of `nats`, empty where `place.target` is `follow`: a broker of
    its own is deployed."""
    topics: Names = ()
    """`kafka`: topics, all partitions of each. `nats`: subjects, each in one JetStream stream."""
    start: Literal["earliest", "latest"] = "earliest"
    """`kafka` and `nats`: where a run without a checkpoint begins."""
    time_column: str = ""
    """Column with the time of the event: ISO 8601, or seconds or milliseconds since 1970. Empty: the broker's time of
    the record; of `files` and your own code, the order of the records."""
    bound_s: NonNegativeFloat = 0.0
    """How far behind the newest event of its partition a record may be. Rows are trained in the order of their events;
    one that comes later than this is counted and dropped."""
    key: str = ""
    """Column that joins labels to rows: a record that has the label's column is a label, any other is a row. Empty:
    each row has its label."""
    label_window_s: NonNegativeFloat = 0.0
    """`key` only: how long, in event time, a row waits for its label. One that has none then gets label 0."""

    max_dropped_share: float = Field(default=1.0, ge=0, le=1)
    """The run stops if more than this share of 1,000 records in a row cannot be trained on; with 1 it warns, and stops
    only if none of the first 1,000 can be. Each such record is skipped and counted, and some are in the run's
    `dead_letters.jsonl`."""
    retention_hours: PositiveFloat = 24.0
    """How long the broker keeps records, at least: longer than the trainer may be away. `embark render` and
    `embark follow --make-streams` set or check it."""
    broker_gib: PositiveInt = 100
    """Disk of the broker that `place.target` `follow` deploys: it has to hold `retention_hours` of records."""
    secret: str = Field(default="", max_length=63, pattern=r"^$|^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")
    """A Kubernetes Secret with the file `options.toml`, for `EMBARK_STREAM_OPTIONS` in the trainer's pod. The broker
    that `place.target` `follow` deploys takes its `token` too; empty: `NAME-nats`."""

    @property
    def is_on(self) -> bool:
        return bool(self.source)

    @property
    def is_custom(self) -> bool:
        return is_custom(self.source)

    @property
    def description(self) -> str:
        """The source with its topics or its path, such as `nats: events.shown at nats://broker:4222`."""
        if self.is_custom:
            return self.source
        place = self.path or f"{', '.join(self.topics)} at {', '.join(self.servers)}"
        return f"{self.source}: {place}"

    def left_out(self) -> Collection[str]:
        return StreamSpec.model_fields if self == StreamSpec() else ()


def stream_mistakes(spec: RunSpec) -> Mistakes:
    """Find conflicts of `[stream]` with itself and with the model."""
    stream, train = spec.stream, spec.train
    if not stream.is_on:
        if stream != StreamSpec():
            yield conflict("stream.source", "", "the rest of [stream] has no effect without it", "set it")
        return
    needs = {"files": ("path",), "kafka": ("servers", "topics"), "nats": ("servers", "topics")}.get(stream.source, ())
    for field in ("path", "servers", "topics"):
        value = getattr(stream, field)
        if field == "servers" and not value and stream.source == "nats" and spec.place.target == "follow":
            continue
        if field in needs and not value:
            yield conflict(f"stream.{field}", "", f'is needed where stream.source is "{stream.source}"', "set it")
        elif value and field not in needs and not (field == "path" and stream.is_custom):
            yield conflict(f"stream.{field}", value, f'has no effect while stream.source is "{stream.source}"',
                           "leave it out")
    if bool(stream.key) != bool(stream.label_window_s):
        missing = "stream.label_window_s" if stream.key else "stream.key"
        yield conflict(missing, "", "labels are joined by stream.key within stream.label_window_s", "set both or none")
    if stream.key and not stream.time_column and stream.source not in ("kafka", "nats"):
        yield conflict("stream.time_column", "", "labels are joined within a time, and the records have none", "set it")
    if stream.key and spec.model.tasks:
        yield conflict("stream.key", stream.key, "joins one label, and the model has [[model.tasks]]",
                       "send rows with their labels")
    if spec.model.kind == "two_tower" or spec.model.has_sequences:
        yield conflict("stream.source", stream.source, f'model.kind = "{spec.model.kind}" cannot follow a stream',
                       "a model of pooled tables and one score")
    if train.decay != "none" and not train.decay_steps:
        yield conflict("train.decay", train.decay, "ends with the run, and a stream has no end",
                       "set train.decay_steps, or leave it out")
