"""``python -m spark_hvd.horovod script.py ARGUMENTS`` runs a script that can import ``horovod``.

Under torchrun, for every rank: ``torchrun --nproc-per-node 2 -m spark_hvd.horovod train.py``.
"""

from __future__ import annotations

import os
import runpy
import sys

from spark_hvd.horovod.start import switch_on


def main(arguments: list[str]) -> None:
    """Run the script, or with -m the module, as ``__main__``."""
    module = arguments[:1] == ["-m"]
    rest = arguments[module:]
    if not rest or (rest[0].startswith("-") and not module):
        sys.exit("usage: python -m spark_hvd.horovod [-m] SCRIPT [ARGUMENT ...]")
    sys.argv = rest
    switch_on()
    if module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(rest[0])))
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
