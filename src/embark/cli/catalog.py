"""The words of `embark catalog`; `catalog_verbs` does what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from embark.cli.console import Console

Region = Annotated[str, Parameter(help="A region, such as us-east-1, eastus, us-central1.")]


def list_(
    *words: str,
    cloud: str = "",
    gpu: str = "",
    region: Region = "",
    min_memory: float = 0.0,
    sort: Literal["price", "memory", "name"] = "name",
    console: Console = Console(),
) -> int:
    """List machines with their accelerators, memory, fabric and price. No network is needed.

    Parameters
    ----------
    words
        What the name, the accelerator or the fabric must hold: `p5`, `h100`, `infiniband`.
    cloud
        aws, azure or gcp.
    gpu
        An accelerator, or its beginning: A100 is A100-80GB too.
    min_memory
        GiB of accelerator memory the whole machine must have.
    sort
        By price, by accelerator memory, or by name within each cloud.
    """
    from embark.catalog import MachineFilter
    from embark.cli.catalog_output import list_machines

    wanted = MachineFilter(words, cloud, gpu, region, min_memory)
    return list_machines(console, wanted, sort)


def show(name: str, /, *, region: Region = "", console: Console = Console()) -> int:
    """Show all that is known of a machine, and its price in every region.

    Parameters
    ----------
    name
        A machine: p4d.24xlarge, ND96asr_v4, a2-highgpu-8g, v5e-4.
    """
    from embark.cli.catalog_output import show_machine

    return show_machine(console, name, region)


def compare(*names: str, region: Region = "", console: Console = Console()) -> int:
    """Set machines side by side.

    Parameters
    ----------
    names
        Two machines or more.
    """
    from embark.cli.catalog_output import show_comparison

    return show_comparison(console, names, region)


def volumes(*, tib: float = 0.0, console: Console = Console()) -> int:
    """List storage: how fast each TiB of it reads, and what it costs.

    Parameters
    ----------
    tib
        A size: how fast that much reads, and what it costs a month.
    """
    from embark.cli.catalog_output import list_volumes

    return list_volumes(console, tib)


def refresh(file: Path, /, *, console: Console = Console()) -> int:
    """Take in a newer price file. Its rows go before the catalog's wherever they are not older.

    Parameters
    ----------
    file
        A CSV with the columns of the catalog's own: machine, region, prices, discounts, source, date, confidence.
    """
    from embark.cli.catalog_output import take_in

    return take_in(console, file)
