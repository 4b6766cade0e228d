"""Lookups and updates on a TPU's SparseCores. Imported only by runs that use them; has never run on a chip. Imports as
`trainers.jax` does."""
