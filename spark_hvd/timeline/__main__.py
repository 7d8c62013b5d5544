"""``python -m spark_hvd.timeline``."""

from __future__ import annotations

from spark_hvd.timeline.command import main

raise SystemExit(main())
