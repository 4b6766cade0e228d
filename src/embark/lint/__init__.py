"""Finds mistakes that validate and yet hang or train nothing, in manifests, images and scripts of any origin. May
import render and below."""
