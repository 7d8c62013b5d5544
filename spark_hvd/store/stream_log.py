"""Reads the log in which Spark's Structured Streaming says which files of a directory count.

A query writes files under their final names and then adds them to the log. Files of an attempt that was killed stay in
the directory, besides those of the attempt that replaced it. Spark's readers also take only the files in the log.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from spark_hvd.store.errors import StoreError
from spark_hvd.store.files import Store
from spark_hvd.store.paths import join

_LOG = "_spark_metadata"


def committed(store: Store, path: str, names: Mapping[str, int]) -> Mapping[str, int]:
    """Return the files that the log counts, of all ``names`` below a directory, such as "/day=1/part-0.parquet".

    Without a log, all count. Values are kept.

    Raises:
        StoreError: The log cannot be read, or a part of it is missing, or a file that it names.
    """
    batches = {
        int(match[1]): name for name in names if (match := re.fullmatch(rf"/{_LOG}/(\d+)(?:\.compact)?", name))
    }  # a compact batch repeats all before it
    if not batches:
        return names
    first = max((number for number, name in batches.items() if name.endswith(".compact")), default=0)
    logged: dict[str, str] = {}
    for number in range(first, max(batches) + 1):
        if number not in batches:
            raise StoreError(
                f"{join(path, _LOG, str(number))} is missing: expected every batch of the stream's log. Next: "
                "restore it, or write the rows again"
            )
        _, *entries = store.read_bytes(path + batches[number]).decode().splitlines()
        for entry in map(json.loads, entries):
            name = unquote(urlsplit(entry["path"]).path)
            if entry.get("action") == "delete":
                logged.pop(posixpath.basename(name), None)
            else:
                logged[posixpath.basename(name)] = name
    found = {name: value for name, value in names.items() if logged.get(posixpath.basename(name), "").endswith(name)}
    if missing := logged.keys() - set(map(posixpath.basename, found)):
        raise StoreError(
            f"{path} was written by a stream, whose log ({_LOG}) names {len(missing)} files that are not there, such "
            f"as {logged[min(missing)]}. Expected the files of all batches. Next: restore them, or write the rows again"
        )
    return found
