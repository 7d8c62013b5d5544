"""``python -m spark_hvd.runner.cli``: the command line."""

from __future__ import annotations

import sys

from spark_hvd.runner.cli import main

sys.exit(main())
