"""One module per scheduler: its job files. Imports as `render` does."""
