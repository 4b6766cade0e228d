"""Checks a cluster that exists against the contract of a run's manifests. Only reads, through kubectl."""

import os

from embark.catalog import load_catalog
from embark.kubernetes.contract import Contract
from embark.kubernetes.objects import Objects
from embark.launch.backends.kubernetes.kubectl import Cluster, Kubectl
from embark.launch.http import NO_RETRY
from embark.launch.shell import Shell
from embark.lint.rendered import render_spec
from embark.render.job import make_job
from embark.render.serving import secret_commands
from embark.render.targets.follow import TOPICS_FILE
from embark.spec import RunSpec
from .host import Check, Checks, Verdict

VOLCANO = ("batch.volcano.sh/v1alpha1", "Job")
VERDICTS: dict[str, Verdict] = {"met": "ok", "unknown": "warning", "missing": "wrong"}


def contract_of(spec: RunSpec) -> Contract:
    """Return the contract of a run: what its manifests, rendered, need of a cluster."""
    import yaml

    job, is_torchx = make_job(spec, load_catalog()), spec.place.target == "torchx"
    # TorchX writes the pods of a Job into an object of Volcano. Topics may be those of another Kafka than Strimzi's.
    files = render_spec(job.with_target("job").spec if is_torchx else job.spec)
    texts = [file.text for file in files if file.path.endswith(".yaml") and file.path != TOPICS_FILE]
    objects = [one for text in texts for one in yaml.safe_load_all(text) if one]
    place, serve = job.place, job.spec.serve
    identities = {serve.service_account: serve.identity or place.identity, place.service_account: place.identity}
    secrets = secret_commands(job.spec, job.name) if place.target in ("serve", "kserve", "follow") else {}
    return Contract(Objects(tuple(objects)), job.namespace, job.num_pods, job.cloud, identities, secrets,
                    (VOLCANO,) if is_torchx else ())


def check_cluster(spec: RunSpec, shell: Shell) -> Checks:
    """Yield each item of the contract as soon as it is known."""
    contract = contract_of(spec)
    cluster = Cluster(kubeconfig=os.getenv("KUBECONFIG", ""), cloud=contract.cloud, namespace=contract.namespace)
    for one in contract.check(Kubectl(shell, cluster, notify=lambda _: None, retry=NO_RETRY)):
        yield Check(one.name.replace("_", " "), VERDICTS[one.state], one.found, one.expected, one.fix)
