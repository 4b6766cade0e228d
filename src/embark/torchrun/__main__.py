"""Runs `python -m embark.torchrun`."""

from embark.errors import leave
from embark.torchrun.launcher import main

leave(main())
