"""One folder for each place a run can be launched on."""
