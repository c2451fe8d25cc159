# SPDX-License-Identifier: Apache-2.0
"""`python3 -m fleet.bench`."""

import sys

from fleet.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
