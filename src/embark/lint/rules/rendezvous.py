"""EMB1xx, first half: do the processes find each other?"""

import itertools
import re
from collections.abc import Iterator

from embark.kubernetes.yaml_nodes import Node
from embark.lint.edits import Edit, replace_within, set_key, set_scalar
from embark.lint.manifests import Manifests, TrainingJob
from embark.lint.pods import Container, Launch, PodTemplate
from embark.lint.read import Document
from embark.lint.rule import Hit, Hits, Located

_REFERENCE = re.compile(r"(?<!\$)\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")
_VARIABLE = re.compile(r"(?<!\$)\$(?:\(([-.\w]+)\)|\{(\w+)\}|(\w+))")
_SHELL_NAMES = re.compile(r"\$\{?(MASTER_ADDR|MASTER_PORT|NNODES|NUM_NODES|WORLD_SIZE|NODE_RANK|RANK)\b")
_INJECTED = {
    "PyTorchJob": re.compile(r"PET_\w+|MASTER_ADDR|MASTER_PORT|WORLD_SIZE|RANK"),
    "TrainJob": re.compile(r"PET_\w+|JOB_COMPLETION_INDEX"),
    "Job": re.compile(r"JOB_COMPLETION_INDEX"),
    "CronJob": re.compile(r"JOB_COMPLETION_INDEX"),
    "JobSet": re.compile(r"JOB_COMPLETION_INDEX|JOBSET_\w+")
}
_SERVICE_VARIABLE = re.compile(r"KUBERNETES_\w+|[A-Z0-9_]+_SERVICE_(?:HOST|PORT)\w*")
_POD_NAME = re.compile(r"^(?P<pod>[a-z0-9]([-a-z0-9]*[a-z0-9])?)(?:\.(?P<service>[a-z0-9][-a-z0-9]*))?(?:\..*)?$")


def undefined_variable(pod: PodTemplate) -> Hits:
    injected = _INJECTED.get(pod.kind)
    for container in pod.containers:
        if container.has_env_from:
            continue
        for node, name in _references(container):
            if (injected is not None and injected.fullmatch(name)) or _SERVICE_VARIABLE.fullmatch(name):
                continue
            if node:
                later = " before it is used" if name in container.environment else ""
                yield Hit(node, f"$({name}) is not defined{later} in container "
                          f"{container.name or 'trainer'}: the program gets the text $({name}) itself",
                          _define(name, pod))


def rendezvous_variable_unset(own_job: TrainingJob, launch: Launch) -> Hits:
    container = own_job.container
    if not launch.is_in_shell or container.has_env_from:
        return
    script = " ".join(container.argv)
    set_here = set(re.findall(r"(?:^|[\s;&|(])(?:export\s+)?([A-Z_]+)=", script))
    for name in dict.fromkeys(_SHELL_NAMES.findall(" ".join(launch.argv))):
        if name not in container.environment and name not in set_here:
            yield Hit(own_job, f"${name} is in torchrun's arguments and nothing in the manifest sets it",
                      f"set {name} among the container's env, or write the value")


def endpoint_not_a_pod_name(own_job: TrainingJob, launch: Launch, manifests: Manifests) -> Hits:
    document, subdomain = own_job.document, _subdomain(own_job)
    known = own_job.container.env_values
    host = _VARIABLE.sub(lambda found: known.get(found[1] or found[2] or found[3], found[0]), launch.endpoint_host)
    match = _POD_NAME.match(host)
    if not match or host.replace(".", "").isdigit() or host == "localhost" or not own_job.is_distributed \
            or (own_job.kind == "JobSet" and not subdomain):
        return
    service = match["service"] or ""
    if not service and manifests.named("Service", host.partition(".")[0], document.namespace):
        return  # a Service of that name stands before the first pod
    if not service:
        why = f"{host} has no service in it, so no other pod can resolve it"
    elif not subdomain:
        why = f"the pods have no subdomain, so {host} is nobody's name"
    elif service != subdomain:
        why = f"the pods are under {subdomain}, and {host} is under {service}"
    elif match["pod"] != _first_pod(own_job):
        why = f"the first pod is {_first_pod(own_job)}, not {match['pod']}"
    else:
        return
    below = subdomain or document.name
    yield Hit(_argument(own_job, host), why,
              f"endpoint {_first_pod(own_job)}.{below}:{launch.endpoint.rpartition(':')[2]}, with subdomain: {below} "
              "in the pod and a headless Service of that name")


def not_indexed(own_job: TrainingJob) -> Hits:
    if own_job.is_distributed and not own_job.is_indexed:
        yield Hit(own_job.num_pods_node or own_job,
                  f"{own_job.num_nodes} pods are to meet, and none has a fixed name",
                  edits=set_key(own_job.spec, "completionMode", "Indexed"))


def service_not_given(own_job: TrainingJob, launch: Launch, manifests: Manifests) -> Hits:
    document, name = own_job.document, _subdomain(own_job) or own_job.document.name
    if own_job.kind == "JobSet" or not own_job.is_distributed or _service(manifests, own_job) is not None:
        return
    elsewhere = [one for one in manifests.of_kind("Service") if one.name == name]
    why = f"is in namespace {elsewhere[0].namespace}, the pods in {document.namespace}" if elsewhere else \
        "is not among the files given"
    yield Hit(own_job.pod.spec["subdomain"] or own_job, f"the headless Service {name} {why}",
              f"a Service {name} with clusterIP: None, publishNotReadyAddresses: true and selector "
              f"batch.kubernetes.io/job-name: {document.name}; subdomain: {name} in the pod")


def service_not_headless(served_job: TrainingJob, service: Document) -> Hits:
    address = service.at("spec.clusterIP")
    if address.text != "None":
        yield Hit(address or service, f"{service.name} is the pods' subdomain and is not headless",
                  edits=set_key(service["spec"], "clusterIP", "None"))


def not_ready_addresses(manifests: Manifests) -> Hits:
    fix = "publishNotReadyAddresses: true"
    for _, service in jobs_with_services(manifests):
        node = service.at("spec.publishNotReadyAddresses")
        if node.value is not True:
            yield Hit(node or service, f"{service.name} names only pods that are Ready already", fix,
                      set_key(service["spec"], "publishNotReadyAddresses", "true"))
    for document in manifests.of_kind("JobSet"):
        node = document.at("spec.network.publishNotReadyAddresses")
        if node.value is False:
            yield Hit(node, "the JobSet's service names only pods that are Ready already", fix,
                      set_scalar(node, "true"))


def service_selects_nothing(served_job: TrainingJob, service: Document) -> Hits:
    name, selector = served_job.document.name, service.at("spec.selector")
    labels = {**served_job.pod.labels, "batch.kubernetes.io/job-name": name, "job-name": name}
    wrong = [f"{key}: {selector[key].text}" for key in selector.names if labels.get(key) != selector[key].text]
    if not selector or wrong:
        why = f"selects {', '.join(wrong)}, which the pods do not have" if selector else "selects nothing"
        yield Hit(selector or service, f"{service.name} {why}",
                  f"selector: {{batch.kubernetes.io/job-name: {name}}}")


def nnodes_differs(job: TrainingJob) -> Hits:
    launch, num_pods = job.launch, job.num_pods
    if not launch or not launch.is_torchrun or launch.nnodes is None or num_pods is None:
        return
    low, high = launch.nnodes
    if low <= num_pods <= high:
        return
    written = launch.options["nnodes"]
    completions = job.spec["completions"].integer
    edits = () if completions not in (None, num_pods) else _nnodes_edits(job, written, num_pods)
    what = "numNodes" if job.kind == "TrainJob" else "replicas" if job.kind == "PyTorchJob" else "parallelism"
    yield Hit(_argument(job, f"nnodes={written}", "nnodes"),
              f"{what} makes {num_pods} pods and --nnodes={written} waits for {written}",
              f"--nnodes={num_pods}, from the same number as {what}", edits)


def elastic_job_waits(job: TrainingJob) -> Hits:
    nnodes = job.launch.nnodes if job.launch is not None and job.launch.is_torchrun else None
    if nnodes and nnodes[0] < nnodes[1] and job.kind == "Job" and not job.spec["successPolicy"]:
        yield Hit(_argument(job, "nnodes"), f"--nnodes={nnodes[0]}:{nnodes[1]} may train on {nnodes[0]} pods, and the "
                  f"Job waits for {job.num_pods or nnodes[1]}")


def completions_differ(job: TrainingJob) -> Hits:
    if not job.is_plain_job or not job.is_distributed:
        return
    completions, parallelism = job.spec["completions"], job.spec["parallelism"]
    each = parallelism.integer if parallelism else 1
    if each is None or (completions and completions.integer is None):
        return
    if (not completions and job.is_indexed) or (completions and completions.integer != each):
        yield Hit(completions or job, f"completions is {completions.text or 'not set'} and parallelism {each}",
                  f"completions: {each}", set_key(job.spec, "completions", str(each)))


def scaled_without_nnodes(document: Document) -> Hits:
    spec = document["spec"]
    node = spec["parallelism"]
    if not node or spec["template"] or document.kind not in ("", "Job"):
        return
    yield Hit(node, f"this sets parallelism to {node.text} and says nothing of the command's --nnodes",
              f"set --nnodes={node.text} in the same change")


def lacks_c10d_option(job: TrainingJob, *, option: str, word: str = "", fix: str = "") -> Hits:
    if job.is_plain_job and job.is_distributed and job.launch and job.launch.options.get("rdzv-backend") == "c10d" \
            and (option not in job.launch.options or word not in job.launch.options[option]):
        yield Hit(_argument(job, "rdzv"), fix=fix.format(job.document.name))


def endpoint_is_local(own_job: TrainingJob, launch: Launch) -> Hits:
    host, is_alone = launch.endpoint_host, "standalone" in launch.options
    is_local = is_alone or host in ("", "localhost", "127.0.0.1", "0.0.0.0", "::1")
    if is_local and (launch.nnodes or (1, 1))[1] > 1:
        why = "--standalone" if is_alone else f"the endpoint {host or 'is not set'}"
        yield Hit(_argument(own_job, "nnodes"), f"{own_job.num_nodes} nodes are to meet, and {why}",
                  f"--rdzv-backend=c10d --rdzv-endpoint={_first_pod(own_job)}."
                  f"{_subdomain(own_job) or own_job.document.name}:29500")


def one_node_rank(job: TrainingJob) -> Hits:
    rank = job.launch.options.get("node-rank", "") if job.launch else ""
    if job.is_distributed and job.is_plain_job and rank.isdigit():
        yield Hit(_argument(job, "node"), f"every pod is node {rank}")


def every_pod_alone(own_job: TrainingJob, launch: Launch) -> Hits:
    meets = launch.endpoint_host not in ("", "localhost", "127.0.0.1") and not own_job.container.has_env_from
    if meets and (own_job.num_pods or 1) > 1 and "nnodes" not in launch.options:
        yield Hit(_argument(own_job, "torchrun"), f"{own_job.num_pods} pods, and torchrun expects one node",
                  f"--nnodes={own_job.num_pods} --node-rank=$JOB_COMPLETION_INDEX")


def _references(container: Container) -> Iterator[tuple[Node, str]]:
    """`$(NAME)` in values and arguments that follow no definition of NAME."""
    launch = container.launch
    is_shell = launch is not None and launch.is_in_shell
    known: set[str] = set()
    for own, (_, value) in container.environment.items():
        yield from ((value, name) for name in _REFERENCE.findall(value.text) if name not in known)
        known.add(own)
    for node in container.argv_nodes:
        # In a shell's text `$(hostname)` is a command; only names in capitals can be meant as variables.
        yield from ((node, name) for name in _REFERENCE.findall(node.text)
                    if name not in known and (not is_shell or name.isupper()))


def own_jobs(manifests: Manifests) -> Iterator[tuple[TrainingJob, Launch]]:
    """Yield jobs whose manifest alone tells torchrun where to meet."""
    for job in manifests.jobs:
        if job.is_plain_job and job.launch and job.launch.is_torchrun:
            yield job, job.launch


def jobs_with_services(manifests: Manifests) -> Iterator[tuple[TrainingJob, Document]]:
    for job in manifests.jobs:
        service = _service(manifests, job)
        if job.is_plain_job and job.is_distributed and service:
            yield job, service


def _service(manifests: Manifests, job: TrainingJob) -> Document | None:
    return manifests.named("Service", _subdomain(job) or job.document.name, job.document.namespace)


def _subdomain(job: TrainingJob) -> str:
    if job.kind == "JobSet":
        network = job.document.at("spec.network")
        return network["subdomain"].text or ("" if network["enableDNSHostnames"].value is False else job.document.name)
    return job.pod.spec["subdomain"].text


def _first_pod(job: TrainingJob) -> str:
    return f"{job.document.name}-{job.pod.role}-0-0" if job.kind == "JobSet" else f"{job.document.name}-0"


def _define(name: str, pod: PodTemplate) -> str:
    if name == "MASTER_ADDR" and pod.kind == "Job":
        service = pod.spec["subdomain"].text or pod.document.name
        return (f"env MASTER_ADDR: {pod.document.name}-0.{service}, with subdomain: {service} and a headless Service "
                f"{service}")
    return f"define {name} among the container's env, above what uses it"


def _nnodes_edits(job: TrainingJob, written: str, num_pods: int) -> tuple[Edit, ...]:
    nodes = job.container.argv_nodes
    for node, spelling in itertools.product(nodes, ("--nnodes=", "--nnodes ")):
        if edits := replace_within(node.location, f"{spelling}{written}", f"{spelling}{num_pods}"):
            return edits
    for flag, value in itertools.pairwise(nodes):
        if flag.text == "--nnodes" and value.text == written:
            return set_scalar(value, f'"{num_pods}"')
    return ()


def _argument(job: TrainingJob, *parts: str) -> Located:
    """Return the word of the command that holds one of these parts, else the job."""
    words = (node for part in parts for node in job.container.argv_nodes if part in node.text)
    return next(words, job)
