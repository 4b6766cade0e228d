"""Finds the mistakes that validate and yet hang, or train nothing, in anyone's manifests, images and scripts."""
