"""TPU slices, through `gcloud`: a queued resource, whose hosts start the run by themselves.

A request may be granted in the middle of the night, so the hosts' job goes with it as their startup script.
"""


from embark.catalog import load_catalog
from embark.formatting import to_one_line
from embark.launch.backend import LaunchRequest, Resource, RunHandle, Status
from embark.launch.run_registry import registry_dir
from embark.launch.supervisor_client import Host, SupervisorState, job_json, names_of, pack_files, status_of
from embark.render.clouds.gcp import account_steps
from embark.render.job import Job, make_job
from embark.render.shell_text import job_words, script
from embark.render.targets import tpu_vm
from embark.render.targets.vm_node import STATE, off_program
from embark.render.wheel import upload_words, wheel_file
from embark.spec import RunSpec
from embark.store import write_atomic
from embark.store.atomic_file import scratch_for
from embark.values import JsonDict
from .clouds import CloudCommands, from_environment, gcp_project
from .machines import RUN_FOLDER, Existing, MachinesBackend, end_later

STARTUP = "startup.sh"
WAITING = {
    "CREATING": "Google is checking the request", "ACCEPTED": "it waits in Google's queue",
    "WAITING_FOR_RESOURCES": "it waits in Google's queue for capacity", "PROVISIONING": "its hosts are being created"
}
PREEMPTED = ("SUSPENDING", "SUSPENDED")


class TpuVm(MachinesBackend):
    """One queued resource, for one slice or several."""

    def handle_of(self, spec: RunSpec) -> RunHandle:
        job = make_job(spec, load_catalog())
        where = {
            "folder": str(registry_dir() / "tpu-vm" / job.name), "object": job.name,
            "PROJECT": gcp_project(job), **from_environment(RUNTIME_VERSION=tpu_vm.runtime_version(job)),
            "ZONE": job.location.zone
        }
        return RunHandle.of(job, "tpu-vm", where)

    def check(self, request: LaunchRequest) -> None:
        handle = request.handle
        super().check(request)
        self._gcloud(handle).check_login()
        if not self._shell.is_dry and self._resource(handle, make_job(request.spec, load_catalog())) is not None:
            raise self._exists(f"the queued resource {handle.where['object']}", handle)

    def _submit(self, request: LaunchRequest, job: Job) -> None:
        handle, startup = request.handle, request.handle.folder / STARTUP
        if not self._shell.is_dry:
            write_atomic(startup, startup_script(job))
            with scratch_for(handle.folder / wheel_file().path) as scratch:
                scratch.write_bytes(wheel_file().data)
        gcloud = self._gcloud(handle)
        gcloud.run_steps(account_steps(job))
        gcloud.change(upload_words(job, handle.folder))
        request.record(Resource(f"the request for {job.num_nodes} x {job.machine.name}, paid by the hour once granted",
                                f"embark cancel {handle.name}"))
        gcloud.change(tpu_vm.create_words(job, str(startup)))

    def _recreate(self, handle: RunHandle, job: Job) -> None:
        """A suspended request is never granted again, so it is deleted and made anew."""
        self._gcloud(handle).change(job_words(job, "tpu_end"))
        self._gcloud(handle).change(tpu_vm.create_words(job, str(handle.folder / STARTUP)))

    def _existing(self, handle: RunHandle, job: Job) -> Existing | None:
        found = self._resource(handle, job)
        if found is None and not self._shell.is_dry:
            return None
        is_up = self._shell.is_dry or _state(found) == "ACTIVE"
        return Existing(hosts=self._hosts(handle, job) if is_up else [],
                        names=(f"{job.num_nodes} x {job.machine.name}",),
                        delete=lambda: self._gcloud(handle).change(job_words(job, "tpu_end")))

    def _look(self, handle: RunHandle, job: Job) -> tuple[list[Host], Status]:
        found = self._resource(handle, job)
        if found is None:
            return [], Status("gone", f"the queued resource {handle.where['object']} does not exist",
                              "embark launch creates it")
        state = _state(found)
        if state == "FAILED":
            return [], Status("failed", f"Google refused the request: {_message(found) or 'no reason'}",
                              f"embark cancel {handle.name}, then another place.zone, or spot, or later")
        if state in PREEMPTED:
            return [], self._lost(handle, f"its TPUs were preempted ({state})", Status("lost"), is_gone=True,
                                  may_recreate=True)
        if state != "ACTIVE":
            return [], Status("pending", f"{WAITING.get(state, 'the request is not active')} ({state})")
        hosts = self._hosts(handle, job)
        states = self._ssh.states(hosts)
        if all(one is None or one == SupervisorState() for one in states.values()):
            return hosts, Status("pending", "its hosts are booting")
        return hosts, status_of(states, names_of(hosts), handle.run_uri)

    def _hosts(self, handle: RunHandle, job: Job) -> list[Host]:
        """Return every host of every slice, each reached by gcloud, which knows its address and the keys."""
        found: list[Host] = []
        for node in tpu_vm.node_names(job):
            for worker in range(job.machine.num_hosts):
                words = self._gcloud(handle).words(job_words(job, "tpu_ssh", node=node, worker=f"--worker={worker}"))
                found.append(Host(name=f"{node} host {worker}", index=len(found), folder=RUN_FOLDER,
                                  words=(*words, "--quiet", "--command"), prefix=("sudo", "-n")))
        return found

    def _resource(self, handle: RunHandle, job: Job) -> JsonDict | None:
        found = self._gcloud(handle).read((*job_words(job, "tpu_describe"), "--format=json"),
                                          missing=("NOT_FOUND", "not found"))
        return found if isinstance(found, dict) else None

    def _gcloud(self, handle: RunHandle) -> CloudCommands:
        return CloudCommands("gcp", self._shell, self._settings(handle))


def startup_script(job: Job) -> str:
    """Return the script that every host runs as root when it boots. It unpacks the supervisor, which sets the host up
    and trains."""
    start = script("Sets this host up and trains.", *tpu_vm.setup_parts(job),
                   f"cd {STATE}\nexec " + " ".join(tpu_vm.train_words()))
    files = {"start.sh": start, "off.sh": off_program(job), "job.json": job_json(
        [f"{RUN_FOLDER}/start.sh"], env=tpu_vm.environment(job), cwd="/", after=end_later())}
    return script(f"Every host of {job.name}: its job, and the supervisor that runs it.",
                  f"mkdir -p {RUN_FOLDER}\nbase64 -d <<'END' | tar -xzf - -C {RUN_FOLDER}\n{pack_files(files)}\nEND",
                  f"exec python3 {RUN_FOLDER}/supervisor.py start {RUN_FOLDER}")


def _state(found: JsonDict | None) -> str:
    return str(((found or {}).get("state") or {}).get("state") or "")


def _message(found: JsonDict) -> str:
    state = found.get("state") or {}
    error = (state.get("failedData") or {}).get("error") or {}
    return to_one_line(str(error.get("message") or state.get("stateInitiator") or ""))[:300]
