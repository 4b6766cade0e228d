"""The image of a spec: its folder rendered, built, pushed, and the image's name written into the spec."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from embark.catalog import load_catalog
from embark.errors import UserError
from embark.launch.image_builder import build, find_builder, push
from embark.launch.image_registry import EXAMPLES, ImageName
from embark.launch.shell import Notify, Shell
from embark.lint.rendered import render_folder
from embark.render.job import make_job
from embark.spec import load_spec
from embark.store import set_in_file


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How to build."""

    tag: str = ""  # The image's name instead of place.image.
    builder: str = ""  # Instead of the first that works.
    build_options: Sequence[str] = ()  # Of the builder's own `build`.
    must_push: bool = False


@dataclass(frozen=True, slots=True)
class ImageResult:
    """An image that was built."""

    image: str  # As place.image names it now; with its digest where it was pushed and the builder reported one.
    builder: str
    spec: str
    folder: str  # What it was built of.
    is_pushed: bool
    settings: tuple[str, ...]  # Lines that are new in the spec.
    edited: tuple[str, ...]  # Files edited by hand, which may name another image.


def make_image(spec: str, options: ImageOptions, shell: Shell, notify: Notify) -> ImageResult:
    """Renders the spec's folder, builds, pushes, and renders again, so that every file names the new image."""
    if not Path(spec).is_file():
        raise UserError(f"{spec}: not a file, so the image's name cannot be written into it",
                        fix="embark init PRESET writes a spec")
    job = make_job(load_spec(spec, [f"place.image={options.tag}"] if options.tag else []), load_catalog())
    if job.spec.place.target == "tpu-vm":
        raise UserError('place.target = "tpu-vm" uses no image: its hosts install Embark\'s wheel', fix="embark launch")
    name = replace(ImageName.parse(job.image), digest="")
    if not name.tag:  # `latest` would be another image tomorrow
        name = replace(name, tag=ImageName.parse(job.default_image).tag)
    if options.must_push and not name.can_be_pushed:
        raise UserError(f"{name} names no registry to push to",
                        fix=f"--tag {EXAMPLES[job.cloud]}, with the names of your own registry")
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
