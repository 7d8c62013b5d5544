"""``python -m spark_hvd.runner.cli``: the command line."""

import sys

from spark_hvd.runner.cli import main

sys.exit(main())
