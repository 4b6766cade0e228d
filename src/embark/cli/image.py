"""`embark image`: its flags and its output."""

from typing import Annotated, Literal

from cyclopts import Parameter

from embark.cli.console import Console
from embark.cli.options import Flag, Spec
from embark.errors import ExitCode
from embark.launch.image import ImageOptions, ImageResult, make_image
from embark.launch.shell import Shell


def image(
    spec: Spec, /, *build_options: Annotated[str, Parameter(allow_leading_hyphen=True)], push: Flag = False,
    builder: Literal["docker", "podman", "buildah"] | None = None, tag: str = "", console: Console = Console(),
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
    options = ImageOptions(tag=tag, builder=builder or "", build_options=build_options, must_push=push)
    result = make_image(spec, options, Shell(), console.text)
    if result.edited:
        console.warning(f"edited by hand, so they may name another image: {', '.join(result.edited)}")
    console.show(result, _render)
    return ExitCode.DONE


def _render(console: Console, result: ImageResult) -> None:
    console.result(f"{'built and pushed' if result.is_pushed else 'built'} {result.image} with {result.builder}")
    for line in result.settings:
        console.text(f"wrote {line} to {result.spec}; all files of {result.folder} name it")
