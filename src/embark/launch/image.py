"""Builds a spec's image with docker, podman or buildah, pushes it, and writes its name into the spec."""

import json
import re
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from embark.catalog import load_catalog
from embark.errors import Fault, UserError
from embark.formatting import to_one_line
from embark.lint.rendered import render_folder
from embark.render.job import make_job
from embark.render.targets.kubernetes import PLACEHOLDER_REGISTRY
from embark.spec import load_spec
from embark.store import set_in_file
from embark.values import frozen
from .backend import explain
from .shell import CommandResult, LineStream, Notify, Shell

EXAMPLES = {
    "aws": "123456789012.dkr.ecr.REGION.amazonaws.com/embark:1",
    "azure": "yourregistry.azurecr.io/embark:1",
    "gcp": "REGION-docker.pkg.dev/your-project/embark/embark:1"
}
"""An image's name in the registry of each cloud."""


@frozen
class ImageName:
    """The parts of `HOST/REPOSITORY:TAG@DIGEST`."""

    host: str  # Empty where the name has no registry.
    repository: str
    tag: str
    digest: str

    @classmethod
    def parse(cls, text: str) -> "ImageName":
        rest, _, digest = text.partition("@")
        first, slash, below = rest.partition("/")
        host, path = (first, below) if slash and (re.search(r"[.:]", first) or first == "localhost") else ("", rest)
        repository, _, tag = path.partition(":")
        return cls(host, repository, tag, digest)

    def __str__(self) -> str:
        name = f"{self.host}/{self.repository}" if self.host else self.repository
        return name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")

    def registry_command(self, topic: str, builder: str = "") -> str:
        """Return the command line that logs in to the registry, or that creates the repository there. Empty: none is
        known."""
        project, _, rest = self.repository.partition("/")
        found = explain(topic, f"{builder} {self.host}", builder=builder, host=self.host, repository=self.repository,
                        project=project, folder=rest.partition("/")[0])
        return found[0].text if found else ""


BUILDERS = ("docker", "podman", "buildah")
_FAST_S = 30.0
_KEPT_LINES = 40  # The last lines of a program's output, to say why it failed.
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def find_builder(shell: Shell, wanted: str) -> str:
    """Return the first builder that answers; only `wanted`, if one is named. Docker does only while its daemon runs."""
    for program in (wanted,) if wanted else BUILDERS:
        with suppress(UserError):  # it is not installed
            if shell.ask([program, "info"], timeout_s=_FAST_S).is_ok:
                return program
    what = f"{wanted} does not work here: `{wanted} info` fails" if wanted else \
        f"no image builder works here: `info` of {', '.join(BUILDERS)} fails, or they are not installed"
    raise UserError(what, "apt-get install -y podman, or https://docs.docker.com/engine/install/; Docker needs its "
                              "daemon running and your user in the group docker")


def build(builder: str, folder: Path, image: ImageName, arguments: Sequence[str], notify: Notify) -> None:
    """Build the folder's Dockerfile, whose defaults are those of its machine. `arguments` go to the builder unchanged.
    """
    if not (folder / "Dockerfile").is_file():
        raise UserError(f"{folder} has no Dockerfile", "embark render writes it; on TPU VMs runs use no image")
    result = _run([builder, "build", "--tag", str(image), *arguments, str(folder)], notify)
    if not result.is_ok:
        raise UserError(f"{builder} could not build {image}: {_last_line(result)}",
                        _fix("build", result, image, builder))


def push(builder: str, image: ImageName, shell: Shell, notify: Notify) -> str:
    """Push the image and return its digest; empty if the builder does not report it."""
    with tempfile.TemporaryDirectory(prefix="embark-image-") as scratch:
        digest_file = Path(scratch) / "digest"
        options = [] if builder == "docker" else ["--digestfile", str(digest_file)]
        result = _run([builder, "push", *options, str(image)], notify)
        if not result.is_ok:
            raise Fault(f"{builder} could not push {image}: {_last_line(result)}",
                        _fix("push", result, image, builder))
        if builder != "docker":
            found = _DIGEST.search(digest_file.read_text() if digest_file.is_file() else "")
            return found[0] if found else ""
    listed = shell.ask(["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", str(image)],
                       timeout_s=_FAST_S)
    names: list[str] = json.loads(listed.out) if listed.is_ok else []
    repository = str(replace(image, tag="", digest=""))
    return next((name.partition("@")[2] for name in names if name.partition("@")[0] == repository), "")


def _run(words: Sequence[str], notify: Notify) -> CommandResult:
    """Run a program and show its output meanwhile; Ctrl-C ends it."""
    lines, kept = LineStream(words, is_merged=True), deque[str](maxlen=_KEPT_LINES)
    try:
        for line in lines:
            notify(line)
            kept.append(line)
        code = lines.wait().code
    finally:
        lines.close()
    return CommandResult(code, out="\n".join(kept))


def _fix(topic: str, result: CommandResult, image: ImageName, builder: str) -> str:
    values = {"login": image.registry_command("login", builder) or f"{builder} login {image.host}".rstrip(),
              "create": image.registry_command("create_repository") or "create the repository first"}
    found = explain(topic, result.out, **values)
    return found[0].fix if found else f"its output says why; {builder} {topic} by hand shows the same"


def _last_line(result: CommandResult) -> str:
    lines = [line for line in result.out.splitlines() if line.strip()]
    return to_one_line(lines[-1])[:300] if lines else f"exit code {result.code}"


@frozen
class ImageOptions:
    """Options for building an image."""

    tag: str = ""  # The image's name instead of place.image.
    builder: str = ""  # Instead of the first that works.
    build_options: Sequence[str] = ()  # Options for the builder's own `build`.
    must_push: bool = False


@frozen
class ImageResult:
    """An image that was built."""

    image: str  # The new place.image, with its digest if it was pushed and the builder reported one.
    builder: str
    spec: str
    folder: str  # The folder that it was built from.
    is_pushed: bool
    settings: tuple[str, ...]  # Lines that are new in the spec.
    edited: tuple[str, ...]  # Files edited by hand, which may name another image.


def make_image(spec: str, options: ImageOptions, shell: Shell, notify: Notify) -> ImageResult:
    """Render the spec's folder, build, push, and render again, so that every file names the new image."""
    if not Path(spec).is_file():
        raise UserError(f"{spec}: not a file, so the image's name cannot be written into it",
                        "embark init PRESET writes a spec")
    job = make_job(load_spec(spec, [f"place.image={options.tag}"] if options.tag else []), load_catalog())
    if job.spec.place.target == "tpu-vm":
        raise UserError('place.target = "tpu-vm" uses no image: its hosts install Embark\'s wheel', "embark launch")
    name = replace(ImageName.parse(job.image), digest="")
    if not name.tag:  # `latest` would be another image tomorrow
        name = replace(name, tag=ImageName.parse(job.default_image).tag)
    # A name with one slash and no host is Docker Hub's.
    is_somebodys = "/" in str(name) and name.host not in ("localhost", PLACEHOLDER_REGISTRY.rstrip("/"))
    if options.must_push and not is_somebodys:
        raise UserError(f"{name} names no registry to push to",
                        f"--tag {EXAMPLES[job.cloud]}, with the names of your own registry")
    builder = find_builder(shell, options.builder)
    folder = Path(render_folder(spec)[0].folder)
    build(builder, folder, name, options.build_options, notify)
    if options.must_push:
        name = replace(name, digest=push(builder, name, shell, notify))
    settings = set_in_file(Path(spec), [f"place.image={name}"])
    report, _ = render_folder(spec)
    edited = tuple(path for path in report.paths("edited") if path in report.skipped)
    return ImageResult(str(name), builder, spec, str(folder), is_pushed=options.must_push, settings=settings,
                       edited=edited)
