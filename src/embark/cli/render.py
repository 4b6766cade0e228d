"""`embark render` and `embark image`: every file a target needs, in a folder where no manual edit is lost, and the
image that they name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from embark.errors import ExitCode, UserError
from embark.formatting import pluralize
from .console import Console, Flag, Settings, Spec

if TYPE_CHECKING:
    from embark.launch.image import ImageResult
    from embark.render.folder import FolderReport

STATES = {"new": "new", "changed": "changed", "same": "unchanged", "edited": "EDITED by hand",
          "left over": "no longer rendered"}


def render(
    spec: Spec, /, *, set_: Settings = (), target: str = "", out: Path | None = None, diff: Flag = False,
    force: Flag = False, console: Console = Console()
) -> int:
    """Write the files that place.target needs on place.machine: manifests, image, cluster, storage, scripts.

    All files are linted. Files edited by hand are kept and reported, with exit code 1.

    The folder keeps the spec as run.toml; --set on that file is written into it.

    Parameters
    ----------
    target
        job, jobset, trainjob, pytorchjob, ray, torchx, slurm, vertex, vm, tpu-vm, follow, serve or kserve.
    out
        The folder to write into. By default the spec's own if it was rendered from this spec, else deploy/NAME.
    diff
        Only show what would change. Exit code 1 if anything would.
    force
        Also overwrite files edited by hand.
    """
    from embark.lint.rendered import render_folder

    if diff and force:
        raise UserError("--diff and --force are mutually exclusive", "leave one out")
    sets = (*set_, f"place.target={target}") if target else set_
    report, warnings = render_folder(spec, sets, out=out, diff=diff, force=force)
    for one in warnings:
        console.warning(f"{one.path}:{one.line}: {one.code} {one.what}")
    if report.unread:
        console.warning(report.unread)
    console.show(report, _render)
    if diff:
        return ExitCode.OTHER if any(file.state != "same" for file in report.files) else ExitCode.DONE
    return ExitCode.OTHER if set(report.paths("edited")) & set(report.skipped) else ExitCode.DONE


def image(
    spec: Spec, /, *build_options: Annotated[str, Parameter(allow_leading_hyphen=True)], push: Flag = False,
    builder: Literal["docker", "podman", "buildah"] | None = None, tag: str = "", console: Console = Console()
) -> int:
    """Build the image of a spec's rendered folder, and write its name into the spec as place.image.

    Renders the folder before, and again with the image's name, so that every file names this image.

    Parameters
    ----------
    build_options
        After --, options of the builder's own build: -- --build-arg VARIANT=cpu --build-arg BASE=python:3.12-slim.
    push
        Push the image to its registry; place.image then has its digest.
    builder
        docker, podman or buildah; the first that works by default.
    tag
        The image's name, such as REGISTRY/embark:1; place.image by default.
    """
    from embark.launch.image import ImageOptions, make_image
    from embark.launch.shell import Shell

    options = ImageOptions(tag=tag, builder=builder or "", build_options=build_options, must_push=push)
    result = make_image(spec, options, Shell(), console.text)
    if result.edited:
        console.warning(f"edited by hand, so they may name another image: {', '.join(result.edited)}")
    console.show(result, _render_image)
    return ExitCode.DONE


def _render(console: Console, report: FolderReport) -> None:
    changed = [file for file in report.files if file.state != "same"]
    if not report.is_written:
        for file in changed:
            console.text(f"{file.path}: {STATES[file.state]}", style="bold")
            console.text(file.diff.rstrip("\n"))
        console.result(f"{pluralize(len(changed), 'file')} of {len(report.files)} would change in {report.folder}"
                       if changed else f"{report.folder} is up to date")
        return
    for line in report.settings:
        console.text(f"wrote {line} to {Path(report.folder) / report.spec}")
    console.table([{"file": file.path, "": STATES[file.state]} for file in report.files])
    console.result(f"{pluralize(len(report.files), 'file')} in {report.folder}: {len(report.paths('new'))} new, "
                   f"{len(report.paths('changed'))} changed; linted")
    edited = [path for path in report.paths("edited") if path in report.skipped]
    if edited:
        console.result(f"not overwritten, because edited by hand: {', '.join(edited)}\n"
                       "embark render … --diff shows the differences, --force overwrites them")
    leftover = report.paths("left over")
    if leftover:
        console.text(f"left in {report.folder}, no longer rendered: {', '.join(leftover)}", style="dim")


def _render_image(console: Console, result: ImageResult) -> None:
    console.result(f"{'built and pushed' if result.is_pushed else 'built'} {result.image} with {result.builder}")
    for line in result.settings:
        console.text(f"wrote {line} to {result.spec}; all files of {result.folder} name it")
