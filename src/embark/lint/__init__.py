"""Finds the mistakes that validate and yet hang, or train nothing, in any manifests, images and scripts. May
import render, catalog, stack, store and spec."""
