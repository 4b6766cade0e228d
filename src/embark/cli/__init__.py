"""One file per command: its flags and its output, no logic. May import every other package; only `__main__` and
`torchrun` import it."""
