"""Whether a run needs JAX, and whether it is installed, before anything imports it."""

from importlib.util import find_spec

from embark.errors import MissingPackage
from embark.spec import RunSpec

DEVICES = ("jax", "tpu")


def wants_jax(spec: RunSpec) -> bool:
    """The spec asks for JAX, or for TPUs, where nothing else runs."""
    place = spec.place
    return place.device in DEVICES or (place.device == "auto" and (place.target == "tpu-vm" or _is_tpu(place.machine)))


def require_jax(spec: RunSpec) -> None:
    """Refuse to run without JAX, with the command that installs it."""
    if find_spec("jax") is None:
        extra = "jax" if spec.place.device == "jax" else "tpu"
        raise MissingPackage(f'place.device = "{spec.place.device}" needs jax, which is not installed',
                             fix=f"pip install 'embark-rec[{extra}]'; on a machine with TPUs it is 'embark-rec[tpu]'")


def _is_tpu(machine: str) -> bool:
    if not machine:
        return False
    from embark.catalog import load_catalog

    known = load_catalog().machines.get(machine)
    return known is not None and known.gpu.kind == "tpu"
