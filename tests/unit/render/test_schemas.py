"""Rendered objects against the models and schemas of the projects that read them.

Kubeflow's come from PyPI. The definitions of JobSet, Kueue, KubeRay, KEDA, KServe, Prometheus, Strimzi and eksctl are
files of those projects: by hand, `EMBARK_SCHEMAS=FOLDER pytest -m schemas`, with `jobsets.crd.yaml`,
`eksctl-…-cluster-config.json` and the like in it.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from render_jobs import job_of

from embark.catalog import load_catalog
from embark.render.clouds.aws import render_eks
from embark.render.job import make_job
from embark.render.render import QUEUED, own_files
from embark.spec import load_spec

MACHINES = ("p5.48xlarge", "Standard_ND96isr_H100_v5", "a3-megagpu-8g")
TRAINER_MODELS = {"TrainJob": "TrainerV1alpha1TrainJob",
                  "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
                  "JobSet": "JobsetV1alpha2JobSet"}
FILES = {"TrainJob": "trainjobs", "TrainingRuntime": "clustertrainingruntimes", "JobSet": "jobsets",
         "PyTorchJob": "pytorchjobs", "RayJob": "ray_rayjobs", "RayCluster": "ray_rayclusters",
         "ClusterQueue": "kueue_kueue.x-k8s.io_clusterqueues", "LocalQueue": "kueue_kueue.x-k8s.io_localqueues",
         "ResourceFlavor": "kueue_kueue.x-k8s.io_resourceflavors", "ScaledObject": "keda_scaledobjects",
         "InferenceService": "kserve_inferenceservices", "PodMonitoring": "gcp_podmonitorings",
         "PodMonitor": "prometheus_podmonitors", "AzurePodMonitor": "azure_podmonitors",
         "KafkaTopic": "strimzi_kafkatopics"}
KEPT = ("type", "enum", "required", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
        "anyOf", "oneOf", "allOf", "not")


def documents(target: str, machine: str) -> list[dict[str, Any]]:
    files = own_files(job_of(machine, target=target, spot=True, queue="team", max_hours=2.0))
    return [document for file in files if file.path.endswith(".yaml") for document in yaml.safe_load_all(file.text)]


def as_kubeflow_reads(document: dict[str, Any]) -> dict[str, Any]:
    from kubeflow_trainer_api import models  # takes seconds

    return getattr(models, TRAINER_MODELS[document["kind"]]).from_dict(document).to_dict()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("target", ["trainjob", "jobset"])
def test_kubeflow_s_models_know_every_field(target, machine):
    seen = 0
    for document in documents(target, machine):
        if document["kind"] in TRAINER_MODELS:
            seen += 1
            assert _lost(document, as_kubeflow_reads(document)) == []
    assert seen


def test_a_field_that_they_do_not_know_would_be_found():
    document = next(d for d in documents("trainjob", "p5.48xlarge") if d["kind"] == "TrainJob")
    document["spec"]["trainer"]["nonsense"] = 1
    found = _lost(document, as_kubeflow_reads(document))
    assert found == ["spec.trainer.nonsense"]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_older_operator_s_models_know_every_field(machine):
    from kubeflow.training.models import KubeflowOrgV1PyTorchJob

    job = next(d for d in documents("pytorchjob", machine) if d["kind"] == "PyTorchJob")
    assert list(_unknown(job, KubeflowOrgV1PyTorchJob)) == []
    job["spec"]["runPolicy"]["nonsense"] = 1
    assert list(_unknown(job, KubeflowOrgV1PyTorchJob)) == ["spec.runPolicy.nonsense"]


@pytest.mark.schemas
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("target", [t for t in QUEUED if t != "job"])
def test_every_object_fits_its_own_definition(target, machine):
    seen = [d for d in documents(target, machine) if d["kind"] in FILES]
    assert seen
    for document in seen:
        _definition(document["kind"]).validate(document)


@pytest.mark.schemas
@pytest.mark.parametrize("more", [(), ("serve.tls_secret=films-tls",), ("serve.auth=none",)], ids=str)
@pytest.mark.parametrize(("definition", "target", "root"), [
    ("ScaledObject", "serve", "gs://bucket/runs"), ("InferenceService", "kserve", "gs://bucket/runs"),
    ("PodMonitoring", "serve", "gs://bucket/runs"), ("PodMonitor", "serve", "s3://bucket/runs"),
    ("AzurePodMonitor", "serve", "az://bucket/runs")])
def test_keda_kserve_and_prometheus_take_the_server(definition, target, root, more):
    sets = [f"place.target={target}", f"store.root={root}", "serve.autoscaler=keda", *more,
            *(["place.storage_account=account"] if root.startswith("az") else [])]
    files = own_files(make_job(load_spec("quickstart", sets), load_catalog()))
    found = [one for file in files if file.path.endswith(".yaml") for one in yaml.safe_load_all(file.text)]
    document = next(one for one in found if one["kind"] == definition.removeprefix("Azure"))
    _definition(definition).validate(document)
    document["spec"]["nonsense"] = 1
    with pytest.raises(jsonschema.ValidationError):
        _definition(definition).validate(document)


@pytest.mark.schemas
def test_strimzi_takes_the_topics_of_a_stream():
    sets = ["place.target=follow", "place.machine=g5.xlarge", "store.root=s3://bucket/runs", "train.decay=none",
            "stream.source=kafka", "stream.topics=['shown']", "stream.servers=['broker:9092']",
            "place.cluster=existing"]
    files = own_files(make_job(load_spec("quickstart", sets), load_catalog()))
    topics = [one for file in files if file.path == "kafka_topics.yaml" for one in yaml.safe_load_all(file.text)]
    assert topics
    for topic in topics:
        _definition("KafkaTopic").validate(topic)


@pytest.mark.schemas
@pytest.mark.parametrize("target", [t for t in QUEUED if t != "job"])
def test_the_definitions_would_refuse_a_field_that_is_not_there(target):
    document = next(d for d in documents(target, "p5.48xlarge") if d["kind"] in FILES)
    document["spec"]["nonsense"] = 1
    with pytest.raises(jsonschema.ValidationError):
        _definition(document["kind"]).validate(document)


@pytest.mark.schemas
@pytest.mark.parametrize("place", [{}, {"spot": True}, {"volume": "fsx-lustre-250"}, {"nodes": 1}], ids=str)
@pytest.mark.parametrize("machine", ["p4d.24xlarge", "p5.48xlarge", "p5e.48xlarge", "g5.xlarge"])
def test_eksctl_takes_the_cluster(machine, place):
    if machine == "p5e.48xlarge" and not place.get("spot"):
        place = {**place, "capacity": "block", "reservation": "cr-0123456789abcdef0", "zone": "us-east-2a"}
    text = next(file.text for file in render_eks(job_of(machine, **place)) if file.path == "eks_cluster.yaml")
    config, schema = yaml.safe_load(text), json.loads(_file("eksctl-*-cluster-config.json").read_text())
    jsonschema.validate(config, schema)
    config["managedNodeGroups"][1]["efa"] = True
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config, schema)


def _lost(given: Any, retained: Any, at: str = "") -> list[str]:
    """Where `given` has a field that a model did not keep."""
    if isinstance(given, dict):
        if not isinstance(retained, dict):
            return [at]
        return [path for key, value in given.items() for path in
                (_lost(value, retained[key], f"{at}.{key}".lstrip(".")) if key in retained
                 else [f"{at}.{key}".lstrip(".")])]
    if isinstance(given, list):
        return [path for one, other in zip(given, retained, strict=True) for path in _lost(one, other, f"{at}[]")]
    return []


def _unknown(value: Any, model: Any, at: str = ""):
    """Fields of `value` that a model in the older style does not name; as deep as its own types go."""
    import kubeflow.training.models as models

    known = {wire: name for name, wire in model.attribute_map.items()}
    for key, inner in value.items():
        where = f"{at}.{key}".lstrip(".")
        if key not in known:
            yield where
            continue
        kind = model.openapi_types[known[key]]
        of_each = kind[kind.index(",") + 1:-1].strip() if kind.startswith("dict(") else ""
        if of_each and hasattr(models, of_each):
            for name, one in inner.items():
                yield from _unknown(one, getattr(models, of_each), f"{where}.{name}")
        elif isinstance(inner, dict) and hasattr(models, kind):
            yield from _unknown(inner, getattr(models, kind), where)


@cache
def _definition(kind: str) -> jsonschema.Draft202012Validator:
    crd = yaml.safe_load(_file(f"{FILES[kind]}.crd.yaml").read_text())
    version = next(v for v in crd["spec"]["versions"] if v.get("storage"))
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    schema["properties"]["apiVersion"] = {"const": f"{crd['spec']['group']}/{version['name']}"}
    return jsonschema.Draft202012Validator(schema)


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """What a strict API server checks of an object's shape: what it would prune as unknown is an error. Rules between
    fields are not in it."""
    found = {key: schema[key] for key in KEPT if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in schema:
        found["properties"] = {name: _strict(inner) for name, inner in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = _strict(schema["additionalProperties"])
    if "items" in schema:
        found["items"] = _strict(schema["items"])
    return found


def _file(pattern: str) -> Path:
    found = sorted(Path(os.environ["EMBARK_SCHEMAS"]).glob(pattern))
    assert found, f"no {pattern} in EMBARK_SCHEMAS"
    return found[-1]
