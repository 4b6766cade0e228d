"""One package per platform that a run can be launched on, behind `base.Backend`. Imports as `launch` does."""
