"""Paths of a store as text: their canonical form, their protocol, and the names of unfinished files."""

from __future__ import annotations

import os
import re
import uuid

import fsspec

from spark_hvd.store.errors import StoreError
from spark_hvd.store.needs import to_install

# A PUT to these is atomic: an object keeps its old content until the upload is complete. They cannot rename.
OBJECT_STORES = frozenset({"s3", "gs", "gcs", "abfs", "az", "adl", "oss", "oci", "r2"})
_ALIASES = {"s3a": "s3", "s3n": "s3", "abfss": "abfs"}  # Hadoop's names; adlfs always uses TLS, as abfss does
_DBFS_MOUNT = "/dbfs"


def complete(name: str, path: str | os.PathLike[str]) -> str:
    """Return ``path`` in its canonical form. ``name`` is the argument's, for messages.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: The path is empty, lacks slashes after the protocol, or has no bucket.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name}={path!r}: expected a path or a URL, got {type(path).__name__}")
    text = os.fspath(path)
    if not text.strip():
        raise ValueError(f"{name}={text!r}: expected a path or a URL such as '/data/fits' or 's3://bucket/fits'")
    match = re.match(r"(?:(\w[\w+.-]*)://|(file|dbfs):/)", text, re.IGNORECASE)
    if match is None:
        if re.match(r"\w{2,}:/", text):
            raise ValueError(f"{name}={text!r}: expected two slashes after the protocol, as in 's3://bucket/fits'")
        return os.path.abspath(os.path.expanduser(text))
    scheme = (match[1] or match[2]).lower()
    protocol, rest = _ALIASES.get(scheme, scheme), text[match.end() :].rstrip("/")
    if protocol == "file" or (protocol == "dbfs" and os.path.isdir(_DBFS_MOUNT)):
        return os.path.abspath(f"{_DBFS_MOUNT if protocol == 'dbfs' else ''}/{rest.lstrip('/')}")
    if protocol == "dbfs":
        return f"dbfs:///{rest.lstrip('/')}"
    if protocol in OBJECT_STORES and not rest.split("/")[0]:
        raise ValueError(f"{name}={text!r}: expected a bucket, as in '{protocol}://bucket/prefix'")
    return f"{protocol}://{rest}"


def check_protocol(url: str) -> None:
    """Check that the file system for ``url`` is installed.

    Raises:
        StoreError: fsspec does not know the protocol, or the package for it is missing.
    """
    protocol = protocol_of(url)
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        raise StoreError(
            f"cannot use {url}: fsspec knows no protocol {protocol!r}. Expected a path, or file://, s3://, gs://, "
            "abfs://, hdfs://, or another protocol that an installed package adds to fsspec"
        ) from error
    except ImportError as error:
        todo = to_install(url) or str(error)
        raise StoreError(f"cannot use {url}: the package for {protocol}:// is not installed. Next: {todo}") from error


def protocol_of(url: str) -> str:
    """Return the protocol of a complete URL; "file" for a path."""
    return url.partition("://")[0] if "://" in url else "file"


def join(root: str, *parts: str) -> str:
    """Return the path of ``parts`` below ``root``."""
    return "/".join([root if "://" in root else root.rstrip("/"), *parts])


def one_name(what: str, name: str) -> str:
    """Return ``name`` if it is a single part of a path, so that it cannot lead out of its directory.

    Raises:
        ValueError: ``name`` is empty, "." or "..", or contains a slash.
    """
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{what}={name!r}: expected the name of a file or directory, not empty and without '/'")
    return name


def local_below(root: str, name: str, source: str) -> str:
    """Return the path of ``name``, which a store has listed, below the local folder ``root``.

    Keys of object stores may be any text, so a key that an attacker chose could lead out of the folder.

    Raises:
        StoreError: ``name`` contains "..", a backslash or a NUL, is absolute, or leads to the folder itself.
    """
    root = os.path.normpath(root)
    odd = "\\" in name or "\0" in name or ".." in name.split("/")
    local = root if odd or os.path.isabs(name) else os.path.normpath(os.path.join(root, name))
    if local == root or os.path.commonpath([root, local]) != root:
        raise StoreError(
            f"refusing {name!r} of {source}: expected the name of a file below that directory, without '..' and "
            "backslashes. spark_hvd writes no such name: delete it, and check who can write there"
        )
    return local


def temporary_name(name: str) -> str:
    """Return a name for the unfinished file ``name``. Spark and pyarrow skip files that start with a dot."""
    return f".{name}.{uuid.uuid4().hex}.tmp"


def is_temporary(name: str) -> bool:
    """Return whether :func:`temporary_name` made this name."""
    return re.fullmatch(r"\..+\.[0-9a-f]{32}\.tmp", name, re.DOTALL) is not None
