"""A TorchX component, `cloud_component.py`: the run as an AppDef for TorchX's Kubernetes scheduler."""

import base64
import shlex

from embark.render.command import (
    SPEC_VARIABLE,
    WAIT_S,
    WRITE_SPEC,
    WRITTEN_SPEC_PATH,
    encoded_spec,
    ranks_line,
    ranks_words,
)
from embark.render.folder import File, Files
from embark.render.job import MAX_RESTARTS, PORT, USER_ID, Job
from embark.render.pod import (
    identity_label,
    node_selector,
    storage_settings,
    tolerations,
)
from embark.render.settings import fabric_needs, grace_s, settings_of, topology_xml
from embark.render.shell_text import python_text
from embark.render.yaml_text import plain
from embark.values import JsonDict

TOPOLOGY_VARIABLE = "EMBARK_TOPOLOGY_BASE64"
TOPOLOGY_WRITTEN = "/tmp/embark-topology.xml"
SUBMIT = "torchx run --workspace '' -s kubernetes -cfg queue=default,namespace={} cloud_component.py:train"


def render_torchx(job: Job) -> Files:
    return [File("cloud_component.py", component(job))]


def component(job: Job) -> str:
    """Python source, into which every value of the spec is put as a literal."""
    env = {name: value for name, value, _ in (*settings_of(job), *storage_settings(job))}
    env |= {"HOME": "/tmp", SPEC_VARIABLE: encoded_spec(job)}
    topology = topology_xml(job)
    if topology:  # no ConfigMap: it comes by a variable, as the spec does
        env |= {TOPOLOGY_VARIABLE: base64.b64encode(topology.encode()).decode(), "NCCL_TOPO_FILE": TOPOLOGY_WRITTEN}
    devices: dict[str, int] = {}
    resource, count = job.machine.fabric.kubernetes_resource, job.machine.num_fabric_devices
    if resource and count and job.num_nodes > 1:
        devices[resource] = count
    values = {
        "NAME": job.name, "IMAGE": job.image, "NUM_NODES": job.num_nodes, "NUM_PROCESSES": job.num_processes,
        "NUM_GPUS": job.num_processes, "NUM_CPUS": job.num_cpus or job.num_processes,
        "MEMORY_MB": (job.memory_gib or 8) * 1024, "DEVICES": devices, "LABELS": plain(node_selector(job)),
        "ENVIRONMENT": env, "MAX_RETRIES": MAX_RESTARTS,
        "START": _start(job), "PORT": PORT, "WAIT_S": WAIT_S, "POD": pod_overlay(job),
        "CLAIMS": {job.claim_name: job.place.volume_path} if job.claim_name else {}
    }
    about = f"Trains {job.title}, by TorchX. The cluster needs Volcano. {SUBMIT.format(job.namespace)}"
    return python_text("cloud_component.py.j2", values, about=about)


def pod_overlay(job: Job) -> JsonDict:
    """Return what pods of every target have and TorchX does not write itself."""
    spec: JsonDict = {
        "serviceAccountName": job.place.service_account, "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace_s(job), "tolerations": plain(tolerations(job)),
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID}
    }
    if job.place.pull_secret:
        spec["imagePullSecrets"] = [{"name": job.place.pull_secret}]
    labels = identity_label(job)
    return {"metadata": {"labels": labels}, "spec": spec} if labels else {"spec": spec}


def _start(job: Job) -> str:
    """Return the shell command of a replica, except where it meets the others."""
    script = fabric_needs(job).env_script
    read = [f". {shlex.quote(script)}"] if script else []
    if topology_xml(job):
        read.insert(0, f'printf %s "${TOPOLOGY_VARIABLE}" | base64 -d > {TOPOLOGY_WRITTEN}')
    return " && ".join([WRITE_SPEC, *read, f"exec {ranks_line(ranks_words(spec_path=WRITTEN_SPEC_PATH), 'MEETING')}"])
