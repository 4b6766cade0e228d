"""Whether SparseCores look up and update the rows: what the chip has, what is installed, what the run needs."""

from dataclasses import dataclass
from importlib.util import find_spec

from embark.errors import MissingPackage, Mistake, SpecError
from embark.spec import RunSpec

CORES = {"TPU v5": 4, "TPU v5p": 4, "TPU v6e": 2, "TPU v6 lite": 2, "TPU7x": 2}
"""SparseCores of a chip, by JAX's name of the chip. v5e has none, and v4's take other programs."""
MAX_IDS = 4096
"""That one core may ask of another at a time, for all tables that lie together: what a core's own memory holds. The
compiler counts 48 bytes an id, of 256 KiB."""
WIDTHS = range(8, 129, 8)
"""Numbers in a row: whole eighths of a line. Wider rows were not tried."""
OPTIMIZERS = ("sgd", "adagrad")


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and why."""

    cores: int
    """Of each chip; 0 where the ordinary path is taken."""
    reason: str
    """Why not, where a chip has cores that are left idle; what serves, where they are not. Empty where it has none."""


def choose_cores(spec: RunSpec, device_kind: str, num_devices: int) -> Choice:
    """By `train.sparsecore`: `on` refuses to run without them."""
    wanted = spec.train.sparsecore
    if wanted == "off":
        return Choice(0, 'SparseCores are left idle: train.sparsecore = "off"' if device_kind in CORES else "")
    cores = CORES.get(device_kind, 0)
    if wanted == "auto" and not cores:
        return Choice(0, "")
    obstacle = f"{device_kind} has none" if not cores else _obstacle(spec, num_devices, cores)
    is_installed = find_spec("jax_tpu_embedding") is not None
    if wanted == "on":
        if obstacle:
            raise SpecError([Mistake("", "train.sparsecore", "on", f"cannot be: {obstacle}",
                                     'use "auto", which takes SparseCores where it can')])
        if not is_installed:
            raise MissingPackage('train.sparsecore = "on" needs jax-tpu-embedding, which is not installed',
                                 fix="pip install 'embark-rec[sparsecore]'")
    if not obstacle and not is_installed:
        obstacle = "jax-tpu-embedding is not installed: pip install 'embark-rec[sparsecore]'"
    if obstacle:
        return Choice(0, f"SparseCores are left idle: {obstacle}")
    return Choice(cores, f"{cores} SparseCores of each chip look up and update the rows of tables")


def _obstacle(spec: RunSpec, num_devices: int, cores: int) -> str:
    """What of the run they cannot do."""
    train, tables = spec.train, spec.model.table_list()
    if train.optimizer == "rowwise_adagrad":
        return ("row-wise Adagrad needs the mean of a row's squares, and a SparseCore's update goes number by number "
                "(train.optimizer = \"adagrad\" or \"sgd\" can be done)")
    if train.optimizer not in OPTIMIZERS:
        return f'train.optimizer = "{train.optimizer}" is not one of theirs'
    for field, value, able in (("table_dtype", train.table_dtype, ("fp32",)),
                               ("comms_dtype", train.comms_dtype, ("fp32",)),
                               ("sharding", train.sharding, ("auto", "row_wise"))):
        if value not in able:
            return f'train.{field} = "{value}" is not theirs'
    num_cores = num_devices * cores
    if num_cores & (num_cores - 1):
        return f"{num_cores} cores are not a power of two"
    if train.batch_size % (8 * num_cores):
        return f"train.batch_size = {train.batch_size} is not a multiple of 8 for each of {num_cores} cores"
    wrong = next((t for t in tables if t.dim not in WIDTHS), None)
    if wrong:
        return f"rows of {wrong.dim} numbers (table {wrong.name}); theirs are multiples of 8 up to {WIDTHS[-1]}"
    most = max(tables, key=lambda t: t.multi_hot)
    num_ids = train.batch_size // num_cores * most.multi_hot
    if num_ids > MAX_IDS:
        return (f"{num_ids:,} ids of table {most.name} for each core in a batch are more than the {MAX_IDS:,} that it "
                "can take (a smaller train.batch_size or more chips)")
    return ""
