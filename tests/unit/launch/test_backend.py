"""Which place takes a run, from its spec alone."""

from __future__ import annotations

import pytest

from embark.errors import UserError
from embark.launch.backend import backend_for, backend_of
from embark.launch.shell import DryRunShell
from embark.spec import load_spec

MACHINE = "place.machine=p5.48xlarge"


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch, tmp_path):
    for variable in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def kind_of(*settings: str, context: str = "") -> str:
    spec = load_spec("quickstart", settings)
    return type(backend_for(spec, DryRunShell(lambda _: None), lambda _: None, context=context)).__name__


@pytest.mark.parametrize(("settings", "name"), [
    ([], "Local"), ([MACHINE], "Kubernetes"), ([MACHINE, "place.target=jobset"], "Kubernetes"),
    ([MACHINE, "place.target=trainjob"], "Kubernetes"), ([MACHINE, "place.target=pytorchjob"], "Kubernetes"),
    (["place.target=ray"], "Ray"), ([MACHINE, "place.target=ray"], "Kubernetes"),
    (["place.target=torchx"], "Local"),
    (["place.machine=a2-highgpu-8g", "place.target=vertex"], "Vertex")])
def test_the_target_and_the_machine_say_who_takes_it(settings, name):
    assert kind_of(*settings) == name


def test_a_ray_cluster_that_is_named_takes_what_would_be_a_rayjob(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.7:8265")
    assert kind_of(MACHINE, "place.target=ray") == "Ray"


def test_a_context_is_for_those_that_kubectl_reaches():
    assert kind_of(MACHINE, context="east") == "Kubernetes"
    with pytest.raises(UserError, match="--context applies to kubectl; this run is launched on ray"):
        kind_of("place.target=ray", context="east")


def test_torchx_is_submitted_by_its_own_command():
    with pytest.raises(UserError) as caught:
        kind_of(MACHINE, "place.target=torchx", "place.namespace=ads")
    assert "torchx run --workspace '' -s kubernetes -cfg queue=default,namespace=ads" in caught.value.fix


def test_every_backend_finds_its_own_runs_again(monkeypatch, tmp_path):
    """By the name that its handles carry."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.7:8265")
    shell = DryRunShell(lambda _: None)
    for settings in ([], [MACHINE], ["place.target=torchx"], ["place.target=ray"],
                     ["place.machine=a2-highgpu-8g", "place.target=vertex", "place.account=ads"]):
        root = "gs://b/runs" if "place.account=ads" in settings else "s3://b/runs"
        spec = load_spec("quickstart", [*settings, f"store.root={root}"])
        place = backend_for(spec, shell, lambda _: None)
        handle = place.handle_of(spec)
        assert type(backend_of(handle, shell, lambda _: None)) is type(place)
