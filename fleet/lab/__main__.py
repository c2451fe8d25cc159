# SPDX-License-Identifier: Apache-2.0
"""Entry of `python -m fleet.lab`, the program behind bin/lab."""

import sys

from fleet.lab.cli import main

sys.exit(main())
