"""What a spec says of serving: the artifact, a replica's memory, and what cannot be deployed."""

import math
from collections.abc import Iterator
from typing import get_args

from embark.catalog import Catalog
from embark.errors import Mistake, nearest
from embark.spec import RunSpec
from embark.spec.place import ServeTarget

SERVE_TARGETS: tuple[str, ...] = get_args(ServeTarget)
GIB = 2**30
_CLOUDS = {"s3": "aws", "az": "azure", "gs": "gcp"}


def artifact_of(spec: RunSpec) -> str:
    return spec.serve.artifact or f"{spec.store.root}/{spec.name}/export"


def serve_mistakes(spec: RunSpec, catalog: Catalog) -> Iterator[Mistake]:
    """What cannot be deployed."""
    artifact = artifact_of(spec)
    if "://" not in artifact:
        yield Mistake("", "serve.artifact", artifact, "is on this machine; pods do not see it",
                      "embark export RUN --to s3://BUCKET/NAME, and set it to that place")
    if spec.serve.memory_gib is None and not knows_tables(spec):
        yield Mistake("", "serve.memory_gib", "", f"{spec.data.path} cannot be read from here, so the tables' size is "
                      "not known", "set it, or render where the data is")
    if spec.serve.machine and spec.serve.machine not in catalog.cpu_machines:
        yield Mistake("", "serve.machine", spec.serve.machine, "the catalog has no such machine without accelerators",
                      nearest(spec.serve.machine, catalog.cpu_machines))
    elif spec.serve.machine:
        room = catalog.cpu_machines[spec.serve.machine].allocatable_gib
        if memory_gib(spec) > room:
            yield Mistake("", "serve.machine", spec.serve.machine,
                          f"a replica needs {memory_gib(spec)} GiB, and pods have {room:,.1f} of it",
                          "embark plan SPEC --serve shows machines with room")


def knows_tables(spec: RunSpec) -> bool:
    """Not where prepared data that cannot be read from here decides them."""
    return spec.data.kind != "prepared" or spec.model.gives_tables


def memory_gib(spec: RunSpec) -> int:
    """Of a replica."""
    from embark.plan.serving import replica_bytes

    return math.ceil(spec.serve.memory_gib or replica_bytes(spec, spec.serve.tables) / GIB)


def with_cloud(spec: RunSpec) -> RunSpec:
    """Without a machine or a cloud of its own, the cloud of the object store that has the artifact."""
    cloud = _CLOUDS.get(artifact_of(spec).partition("://")[0], "")
    if spec.place.machine or spec.place.cloud or not cloud:
        return spec
    return spec.model_copy(update={"place": spec.place.model_copy(update={"cloud": cloud})})
