"""EMB1xx, second half: does the Job survive failures, evictions and its own end?"""

import ast
import re
from collections.abc import Iterator

from embark.catalog.grace_periods import GRACES, POD_GRACE_S
from embark.lint.edit import add_key, replace_within, set_key, set_scalar
from embark.lint.job import TrainingJob
from embark.lint.pods import Pod
from embark.lint.read import Document, PythonFile
from embark.lint.rule import Hit, World
from embark.lint.shell import Command

GRACE_FIELD = "terminationGracePeriodSeconds"
DEFAULT_GRACE_S = int(GRACES["kubernetes"][0])
EXIT_PREEMPTED = 75


def backoff_by_default(job: TrainingJob) -> Iterator[Hit]:
    if not job.spec["backoffLimit"]:
        yield Hit(job.document.place)


def no_failure_policy(job: TrainingJob) -> Iterator[Hit]:
    rules = job.spec.at("podFailurePolicy.rules")
    answer = [condition["type"].text for rule in rules for condition in rule["onPodConditions"]]
    if "DisruptionTarget" not in answer:
        yield Hit(job.document.place)


def failure_policy_needs_never(job: TrainingJob) -> Iterator[Hit]:
    policy = job.pod.spec["restartPolicy"]
    if job.spec["podFailurePolicy"] and policy.text != "Never" and policy.place is not None:
        yield Hit(policy.place, f"podFailurePolicy with restartPolicy: {policy.text} is refused",
                  edits=set_scalar(policy, "Never"))


def no_restart_policy(pod: Pod) -> Iterator[Hit]:
    policy = pod.spec["restartPolicy"]
    if policy.text not in ("Never", "OnFailure") and pod.spec.place is not None:
        if pod.kind == "JobSet" and not policy:
            return  # JobSet's webhook fills it in
        yield Hit(policy.place or pod.place, f"restartPolicy is {policy.text or 'not set'}",
                  edits=set_key(pod.spec, "restartPolicy", "Never"))


def replaced_while_terminating(job: TrainingJob) -> Iterator[Hit]:
    policy = job.spec["podReplacementPolicy"]
    # With a podFailurePolicy, Failed is the default and the only value allowed.
    if policy.text != "Failed" and not job.spec["podFailurePolicy"]:
        yield Hit(policy.place or job.document.place, edits=set_key(job.spec, "podReplacementPolicy", "Failed"))


def never_cleaned_up(job: TrainingJob) -> Iterator[Hit]:
    if not job.spec["ttlSecondsAfterFinished"]:
        yield Hit(job.document.place, edits=add_key(job.spec, "ttlSecondsAfterFinished: 86400"))


def stop_counts_as_success(world: World) -> Iterator[Hit]:
    fix = f"save, then exit with {EXIT_PREEMPTED}, which the podFailurePolicy ignores"
    for file in world.files.pythons:
        for function, call in _handlers_that_succeed(file):
            place = file.place(call)
            edits = replace_within(place, "(0)", f"({EXIT_PREEMPTED})") if place.text == "sys.exit(0)" else ()
            yield Hit(place, f"{function} handles SIGTERM and ends with {place.text}: the Job counts it as done", fix,
                      edits)
    for command in world.commands:
        if command.name == "trap" and len(command.words) > 2 and re.search(r"\bexit\s*(0\b|$|;)", command.argv[1]) \
                and {"TERM", "SIGTERM", "15"} & set(command.argv[2:]):
            yield Hit(command.place, "the trap ends the script with 0 on SIGTERM: the Job counts it as done", fix)


def grace_by_default(job: TrainingJob) -> Iterator[Hit]:
    node = job.pod.spec[GRACE_FIELD]
    if not job.pod.is_whole or not job.gpus or (job.is_spot and job.cloud in ("gcp", "azure") and node):
        return
    if not node or (node.whole or DEFAULT_GRACE_S) < DEFAULT_GRACE_S:
        have = f"{node.text} s" if node else f"the default of {DEFAULT_GRACE_S} s"
        longest = int(POD_GRACE_S[job.cloud]) if job.cloud and job.is_spot else 120
        yield Hit(node.place or job.place, f"a last checkpoint has {have}", f"{GRACE_FIELD}: {longest}",
                  set_key(job.pod.spec, GRACE_FIELD, str(longest)))


def grace_beyond_the_cloud(job: TrainingJob) -> Iterator[Hit]:
    node = job.pod.spec[GRACE_FIELD]
    if not job.is_spot or job.cloud not in POD_GRACE_S:
        return
    longest = int(POD_GRACE_S[job.cloud])
    requested = node.whole if node else DEFAULT_GRACE_S
    if requested is not None and requested > longest:
        said = f"{requested} s" if node else f"the default of {requested} s"
        yield Hit(node.place or job.place,
                  f"the pod counts on {said} and a spot machine of {job.cloud} gives {longest} s",
                  f"{GRACE_FIELD}: {longest}, and save often enough",
                  set_key(job.pod.spec, GRACE_FIELD, str(longest)))


def no_gang(job: TrainingJob) -> Iterator[Hit]:
    if job.is_distributed and job.gpus and not _is_gang(job):
        yield Hit(job.document.place, f"{job.num_nodes} pods are not scheduled together")


def queue_not_given(world: World) -> Iterator[Hit]:
    queues, clusters = world.of_kind("LocalQueue"), world.of_kind("ClusterQueue")
    for job in world.jobs:
        node = job.document.root.at("metadata.labels")["kueue.x-k8s.io/queue-name"]
        names = [queue.name for queue in queues if queue.namespace == job.document.namespace]
        if queues and node.place is not None and node.text not in names:
            yield Hit(node.place, f"LocalQueue {node.text} in {job.document.namespace} is not among the files given",
                      f"one of: {', '.join(sorted({queue.name for queue in queues}))}, in the Job's namespace")
    for queue in queues:
        node = queue.root.at("spec.clusterQueue")
        if clusters and node.place is not None and node.text not in [one.name for one in clusters]:
            yield Hit(node.place, f"ClusterQueue {node.text} is not among the files given",
                      f"one of: {', '.join(sorted(one.name for one in clusters))}")
    flavors = [one.name for one in world.of_kind("ResourceFlavor")]
    for cluster in clusters:
        for group in cluster.root.at("spec.resourceGroups"):
            for flavor in group["flavors"]:
                if flavors and flavor["name"].text not in flavors and flavor["name"].place is not None:
                    yield Hit(flavor["name"].place, f"ResourceFlavor {flavor['name'].text} is not among the files "
                              "given", f"one of: {', '.join(sorted(flavors))}")


def old_kueue(document: Document) -> Iterator[Hit]:
    group, _, version = document.api.partition("/")
    node = document.root["apiVersion"]
    if group == "kueue.x-k8s.io" and version in ("v1beta1", "v1alpha1", "v1alpha2") and node.place is not None:
        yield Hit(node.place, f"{document.kind} is written for {version}",
                  edits=set_scalar(node, "kueue.x-k8s.io/v1beta2") if version == "v1beta1" else ())


def logs_of_one_pod(command: Command) -> Iterator[Hit]:
    name = next((word for word in command.argv if re.match(r"jobs?(\.batch)?/", word)), "")
    if command.begins("kubectl", "logs") and name and not command.has("--all-pods"):
        job = name.partition("/")[2]
        yield Hit(command.place, f"this follows one pod of {name}",
                  f"kubectl logs -f -l batch.kubernetes.io/job-name={job} --prefix --max-log-requests=64")


def _is_gang(job: TrainingJob) -> bool:
    root = job.document.root
    labels, annotations = root.at("metadata.labels"), root.at("metadata.annotations")
    return bool(
        labels["kueue.x-k8s.io/queue-name"] or annotations["kueue.x-k8s.io/queue-name"]
        or root.at("spec.runPolicy.schedulingPolicy") or job.pod.spec["schedulingGroup"]
        or job.pod.spec["schedulerName"].text in ("volcano", "scheduler-plugins-scheduler", "kai-scheduler")
        or any("pod-group" in name or "group-name" in name for name in (*job.pod.labels, *job.pod.annotations))
        or job.document.api.startswith("batch.volcano.sh")
    )


def _handlers_that_succeed(file: PythonFile) -> Iterator[tuple[str, ast.Call]]:
    handlers = {
        ast.unparse(call.args[1]) for call in file.calls("signal.signal")
        if len(call.args) > 1 and ast.unparse(call.args[0]).endswith("SIGTERM")
    }
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef) and node.name in {name.rpartition(".")[2] for name in handlers}:
            for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
                name = ast.unparse(call.func)
                is_zero = not call.args or (isinstance(call.args[0], ast.Constant) and call.args[0].value in (0, None))
                if name in ("sys.exit", "exit", "quit", "os._exit") and is_zero:
                    yield node.name, call
