"""One file per command: its flags and its output. May import every other package; nothing imports it."""
