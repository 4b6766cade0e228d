"""Embark's own wheel, packed from the code that runs here, so that images and machines need no index that has Embark.

Embark is pure Python: a wheel is its files and their metadata. The metadata is the clone's pyproject.toml where the
code runs from a clone, since that of an editable install may be older; otherwise the installed distribution's.
Machines without an image get it through the run's bucket, since user data holds 16 KB only.
"""

import base64
import hashlib
import io
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import embark
from embark.errors import Mistake, SpecError, UserError
from embark.values import JsonDict
from .folder import File
from .job import SCHEMES, Job
from .shell_text import Shell, Words, command, job_text, job_words

DISTRIBUTION = "embark-rec"
FOLDER = "dist"
WHEELS = "/opt/embark-wheels"  # The folder of a machine that has no image.
_DATE = (1980, 1, 1, 0, 0, 0)  # Zip's first: the same files give the same wheel.
_WHEEL = "Wheel-Version: 1.0\nGenerator: embark\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel_name() -> str:
    return f"{DISTRIBUTION.replace('-', '_')}-{embark.__version__}-py3-none-any.whl"


def wheel_file() -> File:
    return File(f"{FOLDER}/{wheel_name()}", data=wheel_bytes())


def wheel_requirement(folder: str, extras: str) -> str:
    """Return the requirement of the wheel in `folder`, by its path, so that no index's version takes its place."""
    return f"{folder}/{wheel_name()}[{extras}]"


@cache
def wheel_bytes() -> bytes:
    package = Path(embark.__file__).parent
    info = f"{DISTRIBUTION.replace('-', '_')}-{embark.__version__}.dist-info"
    parts = {f"embark/{path.relative_to(package).as_posix()}": path.read_bytes() for path in _files_of(package)}
    parts |= {f"{info}/{name}": data for name, data in {**_metadata(package), "WHEEL": _WHEEL.encode()}.items()}
    rows = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in parts.items()]
    parts[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in parts.items():
            entry = zipfile.ZipInfo(name, _DATE)
            entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return packed.getvalue()


def _files_of(package: Path) -> Iterator[Path]:
    for path in sorted(package.rglob("*")):
        names = path.relative_to(package).parts
        if path.is_file() and not any(name == "__pycache__" or name.startswith(".") for name in names):
            yield path


def _metadata(package: Path) -> dict[str, bytes]:
    """METADATA, entry points and license."""
    clone = package.parents[1]
    try:
        project = tomllib.loads((clone / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        project = {}
    if project.get("name") != DISTRIBUTION:
        return _installed_metadata()
    scripts = "".join(f"{name} = {target}\n" for name, target in project["scripts"].items())
    return {
        "METADATA": "".join(f"{name}: {value}\n" for name, value in _metadata_rows(project)).encode(),
        "entry_points.txt": f"[console_scripts]\n{scripts}".encode(),
        **{f"licenses/{name}": (clone / name).read_bytes() for name in project["license-files"]}
    }


def _metadata_rows(project: JsonDict) -> Iterator[tuple[str, str]]:
    """Yield rows of METADATA, by version 2.4 of the core metadata specification."""
    yield "Metadata-Version", "2.4"
    yield "Name", DISTRIBUTION
    yield "Version", embark.__version__
    yield "Summary", project["description"]
    yield "License-Expression", project["license"]
    yield from (("License-File", name) for name in project["license-files"])
    yield "Requires-Python", project["requires-python"]
    yield from (("Requires-Dist", requirement) for requirement in project["dependencies"])
    for extra, requirements in project["optional-dependencies"].items():
        yield "Provides-Extra", extra
        for requirement in requirements:
            name, _, marker = requirement.partition(";")
            condition = f"({marker.strip()}) and extra == '{extra}'" if marker else f"extra == '{extra}'"
            yield "Requires-Dist", f"{name.strip()}; {condition}"


def _installed_metadata() -> dict[str, bytes]:
    try:
        found = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise UserError(f"{DISTRIBUTION} is not installed here, so its wheel cannot be packed",
                        "pip install -e . in a clone of Embark") from None
    license_text = found.read_text("licenses/LICENSE")
    texts = {"METADATA": found.read_text("METADATA"), "entry_points.txt": found.read_text("entry_points.txt"),
             "licenses/LICENSE": license_text}
    return {name: text.encode() for name, text in texts.items() if text is not None}


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def upload_words(job: Job, folder: Path = Path()) -> Words:
    """Copy the wheel of a rendered folder to the bucket; no words if an image has it. TPUs have no image."""
    if job.place.image and not job.is_tpu:
        return ()
    return _copy_words(job, "upload", str(folder / FOLDER / wheel_name()))


def fetch_text(job: Job) -> Shell:
    """Shell text that puts the wheel into `WHEELS`, on the machine."""
    fetch = command(*_copy_words(job, "fetch", f"{WHEELS}/{wheel_name()}"), indent=6)
    return Shell(job_text("fetch_wheel.sh.j2", job, wheels=WHEELS, fetch=fetch).rstrip("\n"))


def _copy_words(job: Job, name: str, file: str) -> Words:
    """Return the command that copies the wheel to or from its place below the run's own files, which the machines may
    read."""
    root, scheme = job.spec.store.root, SCHEMES[job.cloud]
    if not root.startswith(f"{scheme}://"):
        image = "" if job.is_tpu else ", or build an image: embark image"
        raise SpecError([Mistake("", "store.root", root, f"machines of {job.cloud} fetch Embark's wheel from it",
                                 f"set it to {scheme}://BUCKET/runs{image}")])
    bucket, _, prefix = root.removeprefix(f"{scheme}://").strip("/").partition("/")
    path = "/".join(part for part in (prefix, FOLDER, wheel_name()) if part)
    return job_words(job, name, bucket=bucket, object=path, file=file)
