"""EMB9xx: does a server of an exported model become ready, drain, scale and survive its nodes?"""

import re
from collections.abc import Iterator

from embark.kubernetes.names import INSTANCE_TYPE
from embark.kubernetes.objects import quantity
from embark.kubernetes.pods import DEFAULT_GRACE_S, embark_words
from embark.kubernetes.yaml_nodes import NOTHING, Node
from embark.lint.edits import set_key
from embark.lint.manifests import Manifests
from embark.lint.pods import Container, PodTemplate
from embark.lint.read import Document
from embark.lint.rule import Hit, Hits
from embark.render.serving import GIB, versions_gib
from embark.render.targets.endpoints import ARTIFACT
from embark.render.targets.serve import PORT, TABLE_BYTES, TOKEN
from embark.spec import DRAIN_S
from .jobs import GRACE_FIELD

SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
MONITORS = ("PodMonitor", "PodMonitoring", "ServiceMonitor", "ClusterPodMonitoring")
_EMBARK = re.compile(r"embark[-_]rec[^\[\s]*(?:\[(?P<extras>[\w, -]*)\])?")


def servers(manifests: Manifests) -> Iterator[tuple[Container, PodTemplate]]:
    """Yield containers that run `embark serve`."""
    for pod in manifests.pods:
        for container in pod.containers:
            if embark_words(container.argv)[:1] == ["serve"]:
                yield container, pod


def no_readiness_probe(server: Container, pod: PodTemplate) -> Hits:
    if pod.kind != "InferenceService" and not server.node["readinessProbe"]:
        yield Hit(server)


def drain_cut_short(server: Container, pod: PodTemplate) -> Hits:
    if pod.kind == "InferenceService":
        return  # Knative has rules of its own
    grace = pod.spec[GRACE_FIELD]
    have_s = grace.integer if grace.integer is not None else DEFAULT_GRACE_S
    stop = server.node.at("lifecycle.preStop")
    slept = stop.at("sleep.seconds").integer or next(
        (int(found[1]) for word in stop.at("exec.command") if (found := re.search(r"(?:sleep )?(\d+)$", word.text))), 0)
    if have_s < slept + DRAIN_S:
        yield Hit(grace or server,
                  f"the pod is killed after {have_s} s; it waits {slept} s in preStop and drains for up to {DRAIN_S} s",
                  f"{GRACE_FIELD}: {slept + DRAIN_S + 5}", set_key(pod.spec, GRACE_FIELD, str(slept + DRAIN_S + 5)))


def server_on_localhost(server: Container) -> Hits:
    words = server.argv
    said = [word.partition("=")[2] or "".join(words[at + 1 : at + 2]) for at, word in enumerate(words)
            if word == "--host" or word.startswith("--host=")]
    if not said or said[-1] in ("127.0.0.1", "localhost", "::1"):
        yield Hit(server)


def workers_of_the_node(server: Container) -> Hits:
    words = server.argv
    if not server.limits["cpu"] and "EMBARK_SERVE_WORKERS" not in server.environment and not server.has_env_from and \
            not any(word.partition("=")[0] == "--workers" for word in words):
        yield Hit(server)


def memory_below_tables(server: Container, pod: PodTemplate) -> Hits:
    limit = server.limits["memory"]
    have, need = quantity(limit.text) if limit else None, quantity(pod.annotations.get(TABLE_BYTES, ""))
    if have is not None and need is not None and have < need:
        yield Hit(limit or server, f"the limit is {limit.text}, and the tables take {need / 2**30:.1f} GiB")


def surge_without_room(server: Container, pod: PodTemplate, manifests: Manifests) -> Hits:
    """A rollout waits for a machine that has no replica."""
    document, machine = pod.document, manifests.catalog.cpu_machines.get(pod.selector.get(INSTANCE_TYPE, ""))
    strategy = document.at("spec.strategy")
    most, need = strategy.at("rollingUpdate.maxUnavailable"), quantity(server.amount("memory").text)
    is_zero = most.text in ("0", "0%") if most else _num_replicas(document, manifests) < 4  # a quarter, rounded down
    if pod.kind == "Deployment" and strategy["type"].text != "Recreate" and is_zero and machine and need and \
            machine.allocatable_gib * GIB < 2 * need:
        yield Hit(most or server, f"a replica fills a {machine.name}, and a rollout starts one before it ends one: it "
                  "waits for a machine without a replica")


def disk_below_versions(server: Container, pod: PodTemplate) -> Hits:
    limit, tables = server.limits["ephemeral-storage"], quantity(pod.annotations.get(TABLE_BYTES, ""))
    have = quantity(limit.text) if limit else None
    if have is not None and tables is not None and have < (need := versions_gib(tables)) * GIB:
        yield Hit(limit, f"the limit is {limit.text}, and versions take up to {need} GiB", f"{need}Gi")


def metric_nobody_serves(document: Document, manifests: Manifests) -> Hits:
    """No file has what brings the metric to the autoscaler."""
    if document.kind == "HorizontalPodAutoscaler":
        for metric in document.at("spec.metrics"):
            if metric["type"].text in ("Pods", "Object", "External"):
                yield Hit(metric, "", "scale on cpu; or by KEDA, which serves its metrics itself")
    if document.kind != "ScaledObject":
        return
    for trigger in document.at("spec.triggers"):
        pods = [pod for _, pod in servers(manifests) if pod.document.name == _target(document)[1]]
        if trigger["type"].text == "prometheus" and not all(_selectors(pod, manifests, *MONITORS) for pod in pods):
            yield Hit(trigger, "no PodMonitor or PodMonitoring selects the pods: Prometheus reads no metric of theirs",
                      "kubectl apply -f serve_metrics.yaml too: embark render writes it")


def server_without_token(server: Container) -> Hits:
    if TOKEN not in server.environment and not server.has_env_from:
        yield Hit(server)


def server_without_policy(server: Container, pod: PodTemplate, manifests: Manifests) -> Hits:
    if pod.kind != "InferenceService" and not _selectors(pod, manifests, "NetworkPolicy"):
        yield Hit(server)


def exposed_without_tls(document: Document, manifests: Manifests) -> Hits:
    """A load balancer passes requests and their token in plain text."""
    wanted, selector = document.at("spec.type"), document.at("spec.selector").texts
    for server, pod in servers(manifests) if document.kind == "Service" and wanted.text == "LoadBalancer" else ():
        if pod.document.namespace == document.namespace and selector.items() <= pod.labels.items() and \
                not any(word.startswith("--tls-cert") for word in server.argv):
            yield Hit(wanted)


def server_may_write(server: Container, pod: PodTemplate, manifests: Manifests) -> Hits:
    """The server's account is that of what trains, or a policy or a role of it allows more than reading."""
    account, namespace = pod.spec["serviceAccountName"], pod.document.namespace
    for other in manifests.pods if account else ():
        words = [embark_words(container.argv)[:1] for container in other.containers]
        if other.spec["serviceAccountName"].text == account.text and other.document.namespace == namespace and \
                ["serve"] not in words:
            yield Hit(account, f"it runs as {account.text}, as {other.document.name} does")
    for cluster in manifests.of_kind("ClusterConfig"):
        for one in cluster.at("iam.podIdentityAssociations"):
            allowed = [action for statement in one.at("permissionPolicy.Statement") for action in statement["Action"]]
            if (one["namespace"].text, one["serviceAccountName"].text) == (namespace, account.text):
                yield from (Hit(action, f"{account.text} may {action.text}") for action in allowed
                            if re.search(r"\*|Put|Delete|Abort", action.text))
    for command in manifests.commands:
        role = command.flag("--role") or ""
        if (command.flag("--member") or "").endswith(f"{namespace}/sa/{account.text}") and \
                not re.search(r"(?i)viewer$|reader$", role):
            yield Hit(command.value_location("--role"), f"{account.text} has {role}")


def config_without_checksum(pod: PodTemplate) -> Hits:
    """The pods go on with the files of before when their ConfigMap changes."""
    commands = [embark_words(container.argv)[:1] for container in pod.containers]
    mounted = [one["configMap"] for one in pod.spec["volumes"] if one["configMap"]]
    if pod.kind in ("Deployment", "StatefulSet") and mounted and "checksum" not in " ".join(pod.annotations) and any(
            words in (["serve"], ["follow"], ["publish"]) for words in commands):
        yield Hit(mounted[0])


def kserve_without_mode(document: Document) -> Hits:
    metric = document.at("spec.predictor.scaleMetric")
    mode = document.at("metadata.annotations")["serving.kserve.io/deploymentMode"].text
    if document.kind == "InferenceService" and metric.text in ("concurrency", "rps") and \
            mode not in ("Knative", "Serverless"):
        yield Hit(metric, f"it scales on {metric.text}, and its mode is {mode or 'that of the installation'}")


def claim_without_class(document: Document, manifests: Manifests) -> Hits:
    """Nothing creates the disk of a claim."""
    classes = {one.name: one for one in manifests.of_kind("StorageClass")}
    default = "storageclass.kubernetes.io/is-default-class"
    claims = [document["spec"]] if document.kind == "PersistentVolumeClaim" else \
        [one["spec"] for one in document.at("spec.volumeClaimTemplates")]
    for claim in claims:
        name = claim["storageClassName"]
        if not name and not claim["volumeName"] and not any(
                one.at("metadata.annotations")[default].text == "true" for one in classes.values()):
            yield Hit(claim, "the claim names no storageClassName, and no file has a default class", "storageClassName")
        is_ebs = name.text in classes and classes[name.text]["provisioner"].text == "ebs.csi.aws.com"
        for cluster in manifests.of_kind("ClusterConfig") if is_ebs else ():
            if "aws-ebs-csi-driver" not in [one["name"].text for one in cluster["addons"]]:
                yield Hit(name, f"{name.text} is of ebs.csi.aws.com, and the cluster has no addon aws-ebs-csi-driver",
                          "addons: - name: aws-ebs-csi-driver")


def _selectors(pod: PodTemplate, manifests: Manifests, *kinds: str) -> list[Document]:
    """Return objects of these kinds that select the pods."""
    found = [one for one in manifests.of_kind(*kinds) if one.namespace == pod.document.namespace]
    return [one for one in found if (one.at("spec.podSelector.matchLabels") or one.at(
        "spec.selector.matchLabels")).texts.items() <= pod.labels.items()]


def two_autoscalers(document: Document, manifests: Manifests) -> Hits:
    if document.kind == "ScaledObject":
        for other in manifests.of_kind("HorizontalPodAutoscaler"):
            if _target(other) == _target(document):
                yield Hit(document, f"{other.name} and {document.name} both scale {_target(document)[1]}")


def replicas_beside_autoscaler(document: Document, manifests: Manifests) -> Hits:
    replicas = document.at("spec.replicas")
    if document.kind == "Deployment" and replicas and _scaler_of(document, manifests):
        yield Hit(replicas)


def budget_blocks_drain(document: Document, manifests: Manifests) -> Hits:
    """The budget allows no eviction from a Deployment that it selects."""
    if document.kind != "PodDisruptionBudget":
        return
    spec, labels = document["spec"], document.at("spec.selector.matchLabels")
    least, most = spec["minAvailable"], spec["maxUnavailable"]
    for other in manifests.of_kind("Deployment"):
        own = other.at("spec.template.metadata.labels")
        if other.namespace != document.namespace or not labels.names or \
                any(own[name].text != labels[name].text for name in labels.names):
            continue
        num = _num_replicas(other, manifests)
        if most.text in ("0", "0%") or least.text == "100%" or (least.integer is not None and least.integer >= num):
            field = least if least else most
            yield Hit(field or document, f"with {num} of {other.name} running, no pod may be evicted")


def image_without_server(manifests: Manifests) -> Hits:
    """A folder's own Dockerfile makes the image of its servers, and one of another folder does not."""
    homes = {pod.document.location.source.path.parent for _, pod in servers(manifests)}
    if not homes:
        return
    own = homes & {file.source.path.parent for file in manifests.files.dockerfiles}
    commands = [*manifests.commands, *(one for file in manifests.files.dockerfiles for one in file.commands)]
    for command in commands:
        if "install" not in command.argv:
            continue
        for word in command.words:
            if own and word.location.source.path.parent not in own:
                continue
            if (found := _EMBARK.search(word.text)) and "serve" not in re.split(r"[,\s]+", found["extras"] or ""):
                yield Hit(word)


def cloud_run_to_zero(document: Document) -> Hits:
    container, annotations = _cloud_run(document)
    least = annotations["autoscaling.knative.dev/minScale"] or document.at(
        "metadata.annotations")["run.googleapis.com/minScale"]
    if container and least.text in ("", "0"):
        yield Hit(least or document)


def cloud_run_throttled(document: Document) -> Hits:
    container, annotations = _cloud_run(document)
    throttled = annotations["run.googleapis.com/cpu-throttling"]
    if container and throttled.text.lower() != "false":
        yield Hit(throttled or document)


def cloud_run_memory(document: Document) -> Hits:
    """Cloud Run keeps the artifact's files in memory, and its tables are mapped from them."""
    container, annotations = _cloud_run(document)
    limit, need = container.at("resources.limits.memory"), quantity(annotations[TABLE_BYTES].text)
    have = quantity(limit.text or "512Mi")
    if container and have is not None and need is not None and have < need:
        yield Hit(limit or document,
                  f"the memory is {limit.text or '512Mi by default'}, and the tables take {need / 2**30:.1f} GiB of it")


def one_request_at_a_time(document: Document) -> Hits:
    if _azureml(document):
        most = document.at("request_settings.max_concurrent_requests_per_instance")
        if most.integer in (None, 1):
            yield Hit(most or document["environment_variables"] or document)


def endpoint_on_another_port(document: Document) -> Hits:
    """The endpoint looks for the server where it does not listen."""
    asked = [document.at(f"environment.inference_config.{name}_route.port")
             for name in ("liveness", "readiness", "scoring")] if _azureml(document) else [
        port["containerPort"] for port in _cloud_run(document)[0]["ports"]]
    container = _cloud_run(document)[0]
    variables = document["environment_variables"] if _azureml(document) else NOTHING
    own = variables["EMBARK_SERVE_PORT"].text or next(
        (row["value"].text for row in container["env"] if row["name"].text == "EMBARK_SERVE_PORT"), "") or str(PORT)
    for node in asked:
        if node.integer is not None and str(node.integer) != own:
            yield Hit(node, f"it is asked on port {node.integer}, and embark serve listens on {own}")


def _cloud_run(document: Document) -> tuple[Node, Node]:
    """Return the container of `embark serve` in a Knative Service, and the annotations of its revisions."""
    template = document.at("spec.template")
    if document.kind == "Service" and document.api.startswith("serving.knative.dev/"):
        for container in template.at("spec.containers"):
            if any(row["name"].text == ARTIFACT for row in container["env"]):
                return container, template.at("metadata.annotations")
    return NOTHING, NOTHING


def _azureml(document: Document) -> bool:
    """Return whether it is a deployment of Azure ML that runs `embark serve`."""
    return bool(document["endpoint_name"]) and bool(document["environment_variables"][ARTIFACT])


def _target(scaler: Document) -> tuple[str, str, str]:
    """Namespace, name and kind of what it scales."""
    ref: Node = scaler.at("spec.scaleTargetRef")
    return scaler.namespace, ref["name"].text, ref["kind"].text or "Deployment"


def _scaler_of(document: Document, manifests: Manifests) -> Document | None:
    wanted = (document.namespace, document.name, document.kind)
    return next((one for one in manifests.of_kind(*SCALERS) if _target(one) == wanted), None)


def _num_replicas(deployment: Document, manifests: Manifests) -> int:
    """Return the least number of replicas."""
    scaler = _scaler_of(deployment, manifests)
    spec = deployment["spec"] if scaler is None else scaler["spec"]
    return next((node.integer for name in ("minReplicas", "minReplicaCount", "replicas")
                 if (node := spec[name]).integer is not None), 1)
