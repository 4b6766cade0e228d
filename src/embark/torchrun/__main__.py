"""`python -m embark.torchrun`."""

import sys

from embark.torchrun.launcher import main

sys.exit(main())
