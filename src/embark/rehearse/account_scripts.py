"""Runs the scripts that Embark renders for a spec, from an empty account to a trained or served model and back."""

import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

from cloudsim.account import ARTIFACT_BYTES
from cloudsim.headline import find_headline
from cloudsim.session import NEVER_ENDED, AccountSession
from embark.catalog import load_catalog
from embark.errors import UserError
from embark.lint.rendered import render_folder
from embark.render.folder import RECORD, read_record
from embark.render.job import FOLLOW, POD_TARGETS, Job, make_job
from embark.render.monitoring import MONITOR_RESOURCES
from embark.render.serving import ENDPOINTS, artifact_bytes, artifact_of, disk_gib, server_name, token_secret
from embark.render.shell_text import Shell, render_template
from embark.render.targets.kubernetes import PLACEHOLDER_REGISTRY
from embark.spec import load_spec
from embark.values import JsonDict, frozen, read_table
from .account import AccountRehearsal, StepResult

PLAIN = {"vm": "./vm.sh", "tpu-vm": "./tpu_vm.sh"}  # The scripts of targets without a cluster.
SERVES = ("serve", FOLLOW)
CLUSTER_FOLDER = "cluster"  # The folder of a job: the scripts of its cluster make that of the servers too.
MIN_DISK_GIB = 100
STEP_LIMIT_S = 3600.0  # Time limit on this computer.
ENVIRONMENT = {"PROJECT": "your-project", "EMAIL": "you@example.com"}


@frozen
class Step:
    """Commands that belong together."""

    title: str
    commands: str


def rehearse_scripts(spec: str, settings: Sequence[str], on_step: Callable[[StepResult], None]) -> AccountRehearsal:
    """Render a spec and run its scripts in a simulated account; the first step that fails ends the rehearsal. The files
    of a folder that was rendered are taken as they are."""
    given, assumed = Path(spec) if Path(spec).is_dir() else None, list[str]()
    if given:
        spec = _spec_in(given, settings)
        # Its files name the image, and the launch script refuses one without a registry.
        job = make_job(load_spec(spec), load_catalog())
        if image := _image_of_account(job):
            raise UserError(f"{job.image} is of another project or account than the simulated one",
                            f"embark render {spec} --set place.image={image} --out another folder")
    else:
        job, settings, assumed = account_job(spec, settings)
    steps = make_steps(job, is_folder=given is not None)
    root = Path(mkdtemp(prefix="embark-account-"))
    try:
        folder = root / "folder"
        # Rendering would change the user's file.
        source = str(shutil.copy(spec, root / "spec.toml")) if Path(spec).is_file() else spec
        if given:
            _copy_rendered(given, folder)
        else:
            render_folder(source, settings, out=folder)
        if job.target == "serve":
            render_folder(source, [*settings, "place.target=job"], out=folder / CLUSTER_FOLDER)
        (root / "state").mkdir()
        with AccountSession(job.cloud, root / "state") as session:
            env = {**ENVIRONMENT, ARTIFACT_BYTES: artifact_bytes(job.spec) if job.target in ENDPOINTS else 0}
            session.bash("".join(f"export {name}={value}\n" for name, value in env.items()), folder)
            results: list[StepResult] = []
            for step in steps:
                results.append(run_step(session, step, folder))
                on_step(results[-1])
                if not results[-1].is_ok:
                    break
            report = session.report()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return AccountRehearsal(job.cloud, job.spec.place.target, tuple(results), report.paid, tuple(assumed),
                            report.not_modelled, report.elapsed_s)


def make_steps(job: Job, *, is_folder: bool = False) -> list[Step]:
    facts = _facts()
    raw = facts[job.cloud]
    found = re.match(raw["registry"], job.image)
    store = next((path for path in job.object_store_paths if path.is_written), None)
    serves, endpoint = job.target in SERVES, raw["endpoints"].get(job.target)
    if not serves and not endpoint and job.target not in (*POD_TARGETS, *PLAIN):
        raise UserError(f'place.target = "{job.target}" has no script that creates machines',
                        f"set it to {', '.join([*POD_TARGETS, *SERVES, *PLAIN, *ENDPOINTS])}")
    source = artifact_of(job.spec) if serves or endpoint else job.data_source if job.spec.data.path else ""
    ask = partial(facts["ask"].format, row=facts["row"])
    values = {
        "region": job.location.region, "zone": job.location.zone, "cluster": job.location.cluster, "source": source,
        "bucket": source.split("/")[2] if endpoint else "" if store is None else store.name,
        "account": job.spec.place.storage_account, "machine": job.spec.serve.machine,
        "identity": job.spec.place.identity, "server": server_name(job.name), "row": facts["row"],
        "ask": ask(port=8080),
        "env": f"AZURE_STORAGE_ACCOUNT_NAME={job.spec.place.storage_account} " if job.cloud == "azure" else "",
        "disk": MIN_DISK_GIB + 2 * disk_gib(job.spec) if serves else "", **(found.groupdict() if found else {})
    }

    def fill(lines: Sequence[str]) -> Shell:
        return Shell("\n".join(line.format(**values) for line in lines))

    values["artifact"] = fill(facts["artifact"])
    text = render_template(
        "rehearse/account_steps.sh.j2", job=job, raw=raw, fill=fill, ask=ask, source=source, serves=serves,
        endpoint=endpoint, has_registry=found, is_folder=is_folder, artifact=values["artifact"],
        token=token_secret(job.spec, job.name), monitor=MONITOR_RESOURCES[job.cloud],
        script=raw["script"] if job.target in POD_TARGETS else "", machines=PLAIN.get(job.target, ""),
        ends=[line for line in raw["end"]
              if ("{bucket}" not in line or values["bucket"]) and ("{repository}" not in line or found)])
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)[1:]
    return [Step(title, lines.rstrip("\n")) for title, lines in zip(parts[::2], parts[1::2], strict=True)]


def run_step(session: AccountSession, step: Step, folder: Path) -> StepResult:
    before = len(session.report().records)
    done = session.bash(step.commands, folder, timeout_s=STEP_LIMIT_S)
    report = session.report()
    records = report.records[before:]
    if done.returncode == 0:
        return StepResult(step.title, True, len(records), done.stdout)
    error, last = find_headline(done.stdout, () if done.returncode == NEVER_ENDED else records, report.causes)
    command = "" if last is None else " ".join((last.program, *last.words))
    return StepResult(step.title, False, len(records), done.stdout, command, error)


def _spec_in(folder: Path, settings: Sequence[str]) -> str:
    record = read_record(folder)
    if not record.spec:
        raise UserError(f"{folder}: is no folder from embark render", "embark render SPEC --out FOLDER writes one")
    if settings:
        raise UserError("--set changes a spec, and the files of a folder are taken as they are",
                        f"embark rehearse --account {folder / record.spec} --set …, or render the folder again")
    return str(folder / record.spec)


def _copy_rendered(source: Path, folder: Path) -> None:
    """Copy what was rendered, with all edits, and the wheel. Data may lie in the folder too, and it is large."""
    record = read_record(source)
    wheels = [str(one.relative_to(source)) for one in source.glob("dist/*.whl")]
    for name in {RECORD, record.spec, *record.checksums, *wheels}:
        if (source / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, folder / name)


def account_job(spec: str, settings: Sequence[str]) -> tuple[Job, list[str], list[str]]:
    """Return the job with names that can exist in the account, the settings that give it these, and what was assumed.
    """
    catalog, own, assumed = load_catalog(), list(settings), []
    job = make_job(load_spec(spec, own), catalog)
    raw = _facts()[job.cloud]
    if job.image.startswith(PLACEHOLDER_REGISTRY) or "/" not in job.image:
        image = raw["example"].format(region=job.location.region)
        own.append(f"place.image={image}")
        assumed.append(f"place.image is {image}: the spec names no registry")
    elif image := _image_of_account(job):
        own.append(f"place.image={image}")
        assumed.append(f"place.image is {image}: the spec's is of another project or account than the simulated one")
    for field, name, mine in raw["taken"]:
        value = job.spec.store.root if field == "store.root" else job.spec.place.storage_account
        if name in (value, value.partition("://")[2].partition("/")[0]):
            own.append(f"{field}={value.replace(name, mine)}")
            assumed.append(f"{own[-1].replace('=', ' is ', 1)}: {name} is the examples' name, and yours must be unique")
    return make_job(load_spec(spec, own), catalog), own, assumed


def _image_of_account(job: Job) -> str:
    """Return the name that the image has in the account's own registry; empty if it has that, or any owner's will do.
    """
    raw = _facts()[job.cloud]
    found, owner = re.match(raw["registry"], job.image), raw.get("owner")
    if not found or not owner or found["owner"] == owner:
        return ""
    first, last = found.span("owner")
    return f"{job.image[:first]}{owner}{job.image[last:]}"


@cache
def _facts() -> JsonDict:
    return read_table(__file__, "account_steps.toml")
