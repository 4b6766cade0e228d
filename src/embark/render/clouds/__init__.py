"""One module per cloud: its cluster and VM files. Imports as `render` does."""
