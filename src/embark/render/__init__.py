"""The files that clouds and schedulers need to run a spec, as texts. Imports no package above it: lint, launch, cli."""
