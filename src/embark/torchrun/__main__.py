"""Runs `python -m embark.torchrun`."""

from embark.errors import leave
from .launcher import main

leave(main())
