"""The files that clouds and schedulers need to run a spec, as text. May import plan and below."""
