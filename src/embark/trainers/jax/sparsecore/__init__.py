"""Lookups and updates on a TPU's SparseCores. Imported only where a run uses them; no part of it has run on a chip."""
