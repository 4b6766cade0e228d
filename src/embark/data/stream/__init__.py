"""Rows without end: readers of brokers and folders, their order by event time, and the source that trains on them."""
