"""How machines without an image get Embark's wheel: through the run's bucket, since user data holds 16 KB only."""

from pathlib import Path

from embark.errors import Mistake, SpecError
from embark.render.job import SCHEMES, Job
from embark.render.shell_text import Shell, Words, command, job_text, option, variable
from embark.render.wheel import FOLDER, wheel_name

WHEELS = "/opt/embark-wheels"  # On the machine.


def upload_words(job: Job, folder: Path = Path()) -> Words:
    """Copies the wheel of a rendered folder to the bucket; none where an image has it already. TPUs have no image."""
    if job.place.image and not job.is_tpu:
        return ()
    file, (bucket, name) = str(folder / FOLDER / wheel_name()), _object(job)
    if job.cloud == "aws":
        return ("aws", "s3", "cp", file, f"s3://{bucket}/{name}")
    if job.cloud == "azure":
        return ("az", "storage", "blob", "upload", "--account-name", variable("STORAGE_ACCOUNT"), "--auth-mode",
                "login", "--container-name", bucket, "--name", name, "--file", file, "--overwrite")
    return ("gcloud", "storage", "cp", file, f"gs://{bucket}/{name}", option("--project", variable("PROJECT")))


def fetch_text(job: Job) -> Shell:
    """Shell text that puts the wheel into `WHEELS`, on the machine."""
    bucket, name = _object(job)
    file = f"{WHEELS}/{wheel_name()}"
    account = f"https://{job.place.storage_account}.blob.core.windows.net"
    words = {
        "aws": ("aws", "s3", "cp", "--only-show-errors", f"s3://{bucket}/{name}", file),
        "azure": ("env", "AZCOPY_AUTO_LOGIN_TYPE=MSI", "azcopy", "copy", f"{account}/{bucket}/{name}", file),
        "gcp": ("gcloud", "storage", "cp", f"gs://{bucket}/{name}", file),
    }[job.cloud]
    return Shell(job_text("fetch_wheel.sh.j2", job, wheels=WHEELS, fetch=command(*words, indent=6)).rstrip("\n"))


def _object(job: Job) -> tuple[str, str]:
    """Bucket and name: below the run's own files, which the machines may read."""
    root, scheme = job.spec.store.root, SCHEMES[job.cloud]
    if not root.startswith(f"{scheme}://"):
        image = "" if job.is_tpu else ", or build an image: embark image"
        raise SpecError([Mistake("", "store.root", root, f"machines of {job.cloud} fetch Embark's wheel from it",
                                 f"set it to {scheme}://BUCKET/runs{image}")])
    bucket, _, prefix = root.removeprefix(f"{scheme}://").strip("/").partition("/")
    return bucket, "/".join(part for part in (prefix, FOLDER, wheel_name()) if part)
