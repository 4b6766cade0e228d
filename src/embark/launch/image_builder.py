"""Builds and pushes a rendered folder's image with docker, podman or buildah."""

import json
import re
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from embark.errors import Fault, UserError
from embark.formatting import to_one_line
from embark.launch.explanations import explain
from embark.launch.image_registry import ImageName
from embark.launch.shell import CommandResult, LineStream, Notify, Shell

BUILDERS = ("docker", "podman", "buildah")
_FAST_S = 30.0
_KEPT_LINES = 40  # Of a program's output, to say why it failed.
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def usable(program: str, shell: Shell) -> bool:
    """It is here, and it answers: docker only where its daemon runs."""
    try:
        return shell.ask([program, "info"], timeout_s=_FAST_S).is_ok
    except UserError:
        return False


def find_builder(shell: Shell, wanted: str = "") -> str:
    """The first one that works; only `wanted` where one is named."""
    for program in (wanted,) if wanted else BUILDERS:
        if usable(program, shell):
            return program
    what = f"{wanted} does not work here: `{wanted} info` fails" if wanted else \
        f"no image builder works here: `info` of {', '.join(BUILDERS)} fails, or they are not installed"
    raise UserError(what, fix="apt-get install -y podman, or https://docs.docker.com/engine/install/; Docker needs its "
                              "daemon running and your user in the group docker")


def build(builder: str, folder: Path, image: ImageName, arguments: Sequence[str], notify: Notify) -> None:
    """Of the folder's Dockerfile, whose defaults are those of its machine. `arguments` go to the builder unchanged."""
    if not (folder / "Dockerfile").is_file():
        raise UserError(f"{folder} has no Dockerfile", fix="embark render writes it; on TPU VMs runs use no image")
    result = _run([builder, "build", "--tag", str(image), *arguments, str(folder)], notify)
    if not result.is_ok:
        raise UserError(f"{builder} could not build {image}: {_last_line(result)}",
                        fix=_fix("build", result, image, builder))


def push(builder: str, image: ImageName, shell: Shell, notify: Notify) -> str:
    """To its registry; returns the digest, empty where the builder does not report it."""
    with tempfile.TemporaryDirectory(prefix="embark-image-") as scratch:
        digest_file = Path(scratch) / "digest"
        options = [] if builder == "docker" else ["--digestfile", str(digest_file)]
        result = _run([builder, "push", *options, str(image)], notify)
        if not result.is_ok:
            raise Fault(f"{builder} could not push {image}: {_last_line(result)}",
                        fix=_fix("push", result, image, builder))
        if builder != "docker":
            found = _DIGEST.search(digest_file.read_text() if digest_file.is_file() else "")
            return found[0] if found else ""
    listed = shell.ask(["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", str(image)],
                       timeout_s=_FAST_S)
    names: list[str] = json.loads(listed.out) if listed.is_ok else []
    repository = str(ImageName(image.host, image.repository, "", ""))
    return next((name.partition("@")[2] for name in names if name.partition("@")[0] == repository), "")


def _run(words: Sequence[str], notify: Notify) -> CommandResult:
    """Shows its output while it runs; Ctrl-C ends it."""
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
    values = {"login": image.login_command(builder), "create": image.create_command or "create the repository first"}
    found = explain(topic, result.out, **values)
    return found[0].fix if found else f"its output says why; {builder} {topic} by hand shows the same"


def _last_line(result: CommandResult) -> str:
    lines = [line for line in result.out.splitlines() if line.strip()]
    return to_one_line(lines[-1])[:300] if lines else f"exit code {result.code}"
