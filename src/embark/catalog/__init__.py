"""What the clouds offer: machines, accelerators, fabrics, volumes and prices, each row with its source and date."""

from embark.catalog.load import load_catalog, prices_path
from embark.catalog.machine import Catalog, Fabric, Gpu, Interruption, Machine, Origin, Price, Quota, Reserve, Volume
from embark.catalog.search import Wanted, cheapest, compare, find, find_volume, price_in, search

__all__ = [
    "Catalog", "Fabric", "Gpu", "Interruption", "Machine", "Origin", "Price", "Quota", "Reserve", "Volume", "Wanted",
    "cheapest", "compare", "find", "find_volume", "load_catalog", "price_in", "prices_path", "search",
]
