"""What the clouds offer: machine types, accelerators, fabrics, volumes and prices, each row with its source and date.

Facts are data files; `pricing` is the only source of dollars per hour. May import store and below.
"""

from .load import load_catalog, prices_path
from .machine import (
    Catalog,
    Fabric,
    Gpu,
    Interruption,
    Machine,
    Origin,
    Price,
    Quota,
    Reserve,
    Volume,
    find_machine,
)
from .pricing import SpecPrice, lowest_price, machine_of_place, price_spec
from .search import MachineFilter, compare_machines, find_volume, price_in, search_machines

__all__ = [
    "Catalog", "Fabric", "Gpu", "Interruption", "Machine", "MachineFilter", "Origin", "Price", "Quota", "Reserve",
    "SpecPrice", "Volume", "compare_machines", "find_machine", "find_volume", "load_catalog", "lowest_price",
    "machine_of_place", "price_in", "price_spec", "prices_path", "search_machines"
]
