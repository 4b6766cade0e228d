"""The scripts of a rendered folder: templates, with the values that every one of them may use."""

from typing import Any

from embark.render.folder import File
from embark.render.job import Job
from embark.render.location import SCHEMES, buckets, location_of, volume_of
from embark.render.shell_text import needed_setting, render_template, step_text
from embark.render.targets import operators

LOG = "/var/log/embark.log"
"""On a plain machine."""


def script_file(path: str, template: str, job: Job, **values: Any) -> File:
    return File(path, job_text(template, job, **values), is_executable=True)


def job_text(template: str, job: Job, **values: Any) -> str:
    place = job.spec.place
    own = [bucket for bucket in buckets(job) if bucket.scheme == SCHEMES[job.cloud]]
    storage_account = needed_setting("STORAGE_ACCOUNT", place.storage_account,
                                     "a name for the storage account, 3 to 24 small letters and digits")
    return render_template(
        template, job=job, location=location_of(job), place=place, buckets=own, volume=volume_of(job), log=LOG,
        is_vm=place.target in ("vm", "tpu-vm"), versions=operators, step_text=step_text,
        project_setting=needed_setting("PROJECT", place.account, "the id of your Google Cloud project"),
        storage_account_setting=storage_account, **values)
