"""Makes the mistakes of the table, and runs pages, in one session, as somebody would who has no activated environment.

``python -m tests.walk.talk FOLDER NAME ...`` prints for each a JSON object: its name, what was said, the message of the
error, and, if a mistake shakes the session, what a job returned afterwards. A page is named by the file of its program.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import json
import linecache
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.walk.mistakes import DATA, MISTAKES

_SECONDS = 240
"""How long a mistake or a page may take. Then the program ends, and its last words are what it waited for."""


def tried(name: str, call: Callable[[], object]) -> dict[str, Any]:
    """What a user reads, and the message of the error, None if there was none."""
    shown, message = io.StringIO(), None
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            call()
        except BaseException as error:
            message = "".join(traceback.format_exception_only(error))
            shown.write(traceback.format_exc())
    return {"name": name, "said": shown.getvalue(), "message": message}


def make(name: str, folder: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Make one mistake."""
    path = folder / f"{name.replace(' ', '_')}.py"
    path.write_text(MISTAKES[name].code.lstrip())
    linecache.checkcache()
    return tried(name, lambda: exec(compile(path.read_text(), str(path), "exec"), names))


def main() -> None:
    from pyspark.sql import SparkSession

    import spark_hvd

    folder, chosen = Path(sys.argv[1]), sys.argv[2:]
    common: dict[str, Any] = {"__name__": "__main__"}
    for name in chosen:
        print(f"{name}:", file=sys.stderr)
        faulthandler.dump_traceback_later(_SECONDS, exit=True)
        if name not in MISTAKES:
            page = functools.partial(runpy.run_path, name, run_name="__main__")
            print(json.dumps(tried(Path(name).stem, page)), flush=True)
            continue
        if "spark" not in common or common["spark"].sparkContext._jsc is None:
            common["spark"] = SparkSession.builder.master("local[2]").getOrCreate()
            exec(DATA, common)
        told = make(name, folder, dict(common))
        if MISTAKES[name].shakes:
            SparkSession.builder.master("local[2]").getOrCreate()
            told["runs"] = spark_hvd.run(max, [[1, 2]], num_proc=2, verbose=0)
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
