"""Scales a job down to this machine: processes for accelerators, few rows and steps, folders for buckets."""

import base64
import copy
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from embark.data.sample import Sample
from embark.kubernetes.objects import K8sObject, Objects, at, name_of, rows
from embark.kubernetes.pods import Mount, Pod
from embark.lint.pods import Launch, launch_of_argv
from embark.render.command import SPEC_VARIABLE, WRITTEN_SPEC_PATH
from embark.spec import RunSpec, flatten, parse_spec, to_toml
from embark.values import JsonDict, frozen

BUCKETS = "/mnt/embark-rehearsal"  # Path in the pods of the folder that stands for object stores.
SAMPLE = f"{BUCKETS}/sample"  # Path in the pods of the sample of the run's data.
MAX_ROWS = 1000
SAMPLES_PER_RANK = 32
MAX_EVAL_SAMPLES = 2048  # At most as many as are trained on.
MAX_SAMPLES = 32_768  # Rows of the run's own data to train on; a longer rehearsal has several epochs.
SAVES = 10  # Checkpoints in a rehearsal, about.
_PROCESSES = re.compile(r"(--nproc[-_]per[-_]node(?:=|\s+))([\w$(){}]+)")
_PROCESSES_WORD = re.compile(r"--nproc[-_]per[-_]node")
_BUCKET = re.compile(r"\b(s3|gs|az|abfss?|adl)://[^\s\"',;]+")
PRICE_VARIABLE = "EMBARK_USD_PER_HOUR"
_NPROC_VARIABLES = ("PET_NPROC_PER_NODE", "NPROC_PER_NODE")


@frozen
class Change:
    """One difference from the cluster."""

    what: str
    there: str
    here: str

    def __str__(self) -> str:
        return f"{self.what}: {self.there} → {self.here}" if self.there else f"{self.what}: {self.here}"


@frozen
class RehearsedRun:
    """The run that the pods train, if they train one of Embark's."""

    spec: RunSpec
    sample: Sample | None = None  # A sample of the run's own data.
    unread: str = ""  # Why there is no sample: the data cannot be read from here.

    @property
    def folder(self) -> str:
        """The run's folder as the pods see it."""
        return f"{self.spec.store.root.rstrip('/')}/{self.spec.name}"


@frozen
class Downscaled:
    """A job that fits this machine."""

    objects: Objects
    job: K8sObject
    run: RehearsedRun | None
    changes: tuple[Change, ...]


def downscale(job: K8sObject, objects: Objects, *, num_processes: int, num_pods: int, num_steps: int) -> Downscaled:
    """Return copies of the objects that differ only in what `changes` names."""
    copies = [copy.deepcopy(dict(one)) for one in objects.all]
    own = next(new for old, new in zip(objects.all, copies, strict=True) if old is job)
    changes: list[Change] = []
    _fewer_processes(own, copies, num_processes, changes)
    run = None
    for one in copies:
        if one.get("kind") == "ConfigMap":
            _fewer_processes_in_scripts(one, num_processes, changes)
            run = _downscale_spec(one, num_processes, num_pods, num_steps, changes) or run
    for container in _containers(own):
        for row in rows(container, "env"):
            if row.get("name") == SPEC_VARIABLE:  # a target without ConfigMaps
                held = {"data": {WRITTEN_SPEC_PATH: base64.b64decode(str(row["value"])).decode()}}
                run = _downscale_spec(held, num_processes, num_pods, num_steps, changes) or run
                cast(JsonDict, row)["value"] = base64.b64encode(held["data"][WRITTEN_SPEC_PATH].encode()).decode()
    return Downscaled(Objects(tuple(copies)), own, run, tuple(changes))


def downscale_pods(pods: Sequence[Pod], changes: list[Change]) -> tuple[Pod, ...]:
    """Replace buckets by folders, and list what this machine does not have."""
    found = []
    for pod in pods:
        if pod.devices:
            changes.append(Change("devices", ", ".join(pod.devices), "none"))
        for one in pod.sidecars:
            changes.append(Change(f"container {one}", "beside the trainer", "not started"))
        for one in pod.secrets:
            changes.append(Change(one, "of the cluster", "not here, and not set"))
        for mount in pod.mounts:
            if mount.kind in ("shared", "host"):
                changes.append(Change(mount.path, mount.what, "a folder of this machine, empty at first"))
        pod = replace(pod, mounts=tuple(_with_scripts(mount, pod.words, changes) for mount in pod.mounts))
        if (launch := launch_of(pod)) and launch.is_torchrun:
            changes.append(Change("variable PET_TEE", "", "3, so that lines say which process of the pod said them"))
            pod = replace(pod, env={"PET_TEE": "3", **pod.env})
        # A pod that writes its spec into its own /tmp gets one here too.
        own = [Mount("/tmp", "scratch", "tmp")] if SPEC_VARIABLE in pod.env else []
        pod = replace(pod, command=tuple(_folders(word, changes) for word in pod.command),
                      args=tuple(_folders(word, changes) for word in pod.args),
                      env={name: _folders(value, changes) for name, value in pod.env.items()},
                      mounts=(*pod.mounts, Mount(BUCKETS, "shared", "buckets"), *own))
        found.append(pod)
    changes[:] = list(dict.fromkeys(changes))
    return tuple(found)


def _with_scripts(mount: Mount, words: Sequence[str], changes: list[Change]) -> Mount:
    """Provide scripts of the node that a shell reads first, such as a fabric's settings, as empty files."""
    if mount.kind != "host":
        return mount
    read = {path for word in words for path in re.findall(r"(?:^|;)\s*(?:\.|source)\s+([^\s;&]+)", word)}
    below = sorted(path for path in read if path.startswith(f"{mount.path.rstrip('/')}/"))
    changes += [Change(path, "a script of the node", "an empty one") for path in below]
    return replace(mount, files={path[len(mount.path.rstrip("/")) + 1:]: "" for path in below})


def launch_of(pod: Pod) -> Launch | None:
    """Return how the pod starts its training, as the linter reads it."""
    return launch_of_argv(pod.words, pod.env)


def _fewer_processes(job: JsonDict, objects: Sequence[JsonDict], count: int, changes: list[Change]) -> None:
    spec = job.get("spec") or {}
    for holder, key in ((spec, "nprocPerNode"), (spec.get("trainer") or {}, "numProcPerNode"),
                        (spec.get("elasticPolicy") or {}, "nProcPerNode")):
        said = holder.get(key)
        if said is not None and (key != "numProcPerNode" or isinstance(said, int)):
            changes.append(Change("processes in a pod", str(said), str(count)))
            holder[key] = type(said)(count) if isinstance(said, (int, str)) else count
    runtime = at(spec, "runtimeRef.name")
    runtimes = [one for one in objects if str(one.get("kind")).endswith("TrainingRuntime") and name_of(one) == runtime]
    for container in _containers([job, *runtimes]):
        for key in ("command", "args"):
            words = container.get(key)
            if isinstance(words, list):
                container[key] = _with_processes([str(word) for word in words], count, changes)
        _downscale_variables(container, count, changes)


def _fewer_processes_in_scripts(config: JsonDict, count: int, changes: list[Change]) -> None:
    """Reduce the processes of a driver script, which starts torchrun itself."""
    for name, text in (config.get("data") or {}).items():
        if str(name).endswith(".py"):
            config["data"][name] = _with_processes([str(text)], count, changes)[0]


def _downscale_variables(container: Any, count: int, changes: list[Change]) -> None:
    """Set as many processes, one thread each, and no price: a rehearsal costs nothing, and would else stop at a budget.
    """
    kept = []
    for row in rows(container, "env"):
        name, value = row.get("name"), str(row.get("value", ""))
        new = value
        if name == PRICE_VARIABLE:
            changes.append(Change(f"variable {name}", "a price", "not set: this machine costs nothing"))
            continue
        if name in _NPROC_VARIABLES and value:
            new = str(count)
        elif name == "OMP_NUM_THREADS" and value.isdigit() and int(value) > 1:
            new = "1"
        if new != value:
            changes.append(Change(f"variable {name}", value, new))
        kept.append({**row, "value": new} if new != value else row)
    if "env" in container:
        container["env"] = kept


def _containers(thing: Any) -> Iterator[Any]:
    """Yield every container of an object, whatever its kind, and the trainer of a TrainJob."""
    if isinstance(thing, dict):
        yield from rows(thing, "containers")
        yield from [thing["trainer"]] if thing.get("trainer") else []
        thing = list(thing.values())
    for one in thing if isinstance(thing, list) else ():
        yield from _containers(one)


def _with_processes(words: list[str], count: int, changes: list[Change]) -> list[str]:
    found = []
    for at_, word in enumerate(words):
        before = words[at_ - 1] if at_ else ""
        if _PROCESSES_WORD.fullmatch(before):
            changes.append(Change("processes in a pod", word, str(count)))
            found.append(str(count))
            continue
        for match in _PROCESSES.finditer(word):
            if match[2] != str(count):
                changes.append(Change("processes in a pod", match[2], str(count)))
        found.append(_PROCESSES.sub(lambda match: f"{match[1]}{count}", word))
    return found


def _downscale_spec(
    config: JsonDict, num_processes: int, num_pods: int, num_steps: int, changes: list[Change]
) -> RehearsedRun | None:
    """Scale the spec in a ConfigMap down to what a CPU can do in a minute."""
    for name, text in (config.get("data") or {}).items():
        if not str(name).endswith(".toml"):
            continue
        old = parse_spec(str(text))
        if old is None:
            continue  # what is wrong with it, the pods will say
        counts = old.place.node_counts if old.place.is_elastic else [num_pods]
        world_size = num_processes * math.lcm(*counts)
        sample, unread = _take_sample(old, world_size, num_steps)
        new = downscale_spec(old, world_size, num_steps, sample)
        if sample is not None:
            changes.append(Change("data", old.data.path, f"a sample of {sample.num_train:,} rows, with ids modulo "
                                  f"{MAX_ROWS:,}"))
        elif unread:
            changes.append(Change("data", old.data.path, "synthetic samples"))
        changes += spec_changes(old, new)
        config["data"][name] = to_toml(new)
        return RehearsedRun(new, sample, unread)
    return None


def spec_changes(old: RunSpec, new: RunSpec) -> list[Change]:
    """Return the differences of two specs, by field."""
    before, after = flatten(old.model_dump()), flatten(new.model_dump())
    return [Change(key, _short(before.get(key)), _short(after[key])) for key in after if after[key] != before.get(key)]


def _take_sample(spec: RunSpec, world_size: int, num_steps: int) -> tuple[Sample | None, str]:
    """Return a sample of the run's own data with at least one row for each rank; or why there is none."""
    if spec.data.kind == "synthetic":
        return None, ""
    from embark.data.sample import take_sample

    num_train = min(SAMPLES_PER_RANK * world_size * num_steps, MAX_SAMPLES)
    sample, why = take_sample(spec, num_train=num_train, num_eval=min(num_train, MAX_EVAL_SAMPLES))
    if sample is not None and sample.num_train < world_size:
        return None, f"{spec.data.path}: has {sample.num_train} rows to train on, fewer than ranks"
    return sample, why


def downscale_spec(spec: RunSpec, world_size: int, num_steps: int, sample: Sample | None = None) -> RunSpec:
    """Return the run scaled down. The batch must be divisible by `world_size`; `sample` is the training data."""
    values = (sample.spec if sample else spec).model_dump()
    model, data, train, store = values["model"], values["data"], values["train"], values["store"]
    model["rows_per_table"] = _fewer(model["rows_per_table"])
    model["tables"] = [{**table, "rows": _fewer(table["rows"])} for table in model["tables"]]
    if sample is not None:
        tables = sample.spec.model.table_list()
        model["tables"] = [{**table.model_dump(), "rows": _fewer(table.rows)} for table in tables]
        data |= {"kind": "prepared", "code": "", "path": SAMPLE, "eval_split": "validation"}
    elif data["kind"] != "synthetic":
        data |= {"kind": "synthetic", "code": "", "path": "", "dense_columns": []}
        tasks = [{key: value for key, value in task.items() if key not in ("label", "above")}
                 for task in model.get("tasks", ())]
        model |= {"tasks": tasks} if tasks else {}
    most = min(train["batch_size"], sample.num_train if sample else train["batch_size"])
    train["batch_size"] = min(most // world_size or 1, SAMPLES_PER_RANK) * world_size
    data["num_train_samples"] = train["batch_size"] * num_steps
    data["num_eval_samples"] = min(data["num_eval_samples"], data["num_train_samples"], MAX_EVAL_SAMPLES)
    train["num_steps"] = num_steps
    train["num_epochs"] = 1
    train |= {"eval_every": 0, "early_stopping_patience": 0, "early_stopping_metric": "auc",
              "early_stopping_min_delta": 0.0}
    train["warm_start"] = ""  # its tables are larger
    if "adam" in train["optimizer"]:
        train["optimizer"] = "rowwise_adagrad"
    if train["engine"] == "cuda_graph":
        train["engine"] = "auto"
    values["place"] |= {"device": "cpu", "budget_usd": None}  # without a price a run refuses a budget
    store["root"] = _folders(store["root"], [])
    store["checkpoint_every"] = max(1, num_steps // SAVES)
    values["watch"]["every"] = 1
    return RunSpec.model_validate(values)


def _fewer(rows_: Any) -> Any:
    return min(rows_, MAX_ROWS) if isinstance(rows_, int) else tuple(min(one, MAX_ROWS) for one in rows_)


def _folders(text: str, changes: list[Change]) -> str:
    """Replace every URI of an object store by a folder that all pods see."""
    def folder(match: re.Match[str]) -> str:
        scheme, rest = match[0].split("://", 1)
        changes.append(Change("object store", match[0], f"{BUCKETS}/{scheme}/{rest}, a folder of this machine"))
        return f"{BUCKETS}/{scheme}/{rest}"

    return _BUCKET.sub(folder, text)


def _short(value: Any) -> str:
    text = str(list(value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 40 else f"{text[:36]} …]"
