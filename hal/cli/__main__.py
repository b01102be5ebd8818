# SPDX-License-Identifier: Apache-2.0
"""``python -m hal.cli`` is ``hal``."""

import sys

from hal.cli import main

sys.exit(main())
