"""Runs on plain machines whose clouds' programs are recorded."""

from __future__ import annotations

from pathlib import Path

from cloud_programs import Clouds

from embark.launch.backend import LaunchRequest
from embark.launch.backends.vm import Vm
from embark.spec import load_spec

MACHINES = {
    "aws": ["place.machine=g5.xlarge", "place.region=us-east-1"],
    "azure": ["place.machine=Standard_NC24ads_A100_v4", "place.storage_account=account"],
    "gcp": ["place.machine=a2-highgpu-1g", "place.account=my-project"],
}
CLOUDS = tuple(MACHINES)


def spec_for(cloud: str, tmp_path: Path, *sets: str):
    return load_spec("quickstart", ["name=dlrm", *MACHINES[cloud], "place.nodes=2", "place.target=vm",
                                    "train.batch_size=1024", f"store.root=file://{tmp_path}/runs", *sets])


def launched(cloud: str, tmp_path: Path, *sets: str):
    clouds = Clouds()
    place, spec = Vm(clouds, notify=lambda _: None), spec_for(cloud, tmp_path, *sets)
    handle = place.handle_of(spec)
    place.check(LaunchRequest(spec, handle))
    place.submit(LaunchRequest(spec, handle))
    return clouds, place, handle


def machines(clouds: Clouds) -> list[dict]:
    return [clouds.made[f"machine {name}"] for name in clouds.names("machine")]
