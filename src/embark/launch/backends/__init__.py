"""One module or package per platform, each with a subclass of `LaunchBackend`. Imports as `launch` does."""
