"""The way from a raw row to ids and numbers: cells, transforms, keys, id maps. Preparation, files in memory, streams,
`score` and `serve` all take it, so that training and serving agree. May import store, spec and errors."""
