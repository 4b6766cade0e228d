"""Launches runs on VMs of AWS, Azure and Google Cloud, over ssh. Imports as `launch` does."""
