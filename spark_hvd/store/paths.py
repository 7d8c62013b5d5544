"""Paths of a store as text: the one form they are kept in, their protocol, names of files that are being written."""

from __future__ import annotations

import os
import re
import uuid

import fsspec

from spark_hvd.store.errors import StoreError
from spark_hvd.store.needs import to_install

# A PUT to these is atomic: an object has its old content until the upload is complete. They have no rename.
OBJECT_STORES = frozenset({"s3", "gs", "gcs", "abfs", "az", "adl", "oss", "oci", "r2"})
_ALIASES = {"s3a": "s3", "s3n": "s3", "abfss": "abfs"}  # what Hadoop calls them: always over TLS, as adlfs does
_DBFS_MOUNT = "/dbfs"


def complete(name: str, path: str | os.PathLike[str]) -> str:
    """``path`` in the one form that a Store holds; ``name`` is the argument's, for messages."""
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
    """StoreError where fsspec has no file system for ``url``, or misses the package of it."""
    protocol = protocol_of(url)
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        raise StoreError(
            f"cannot use {url}: fsspec knows no protocol {protocol!r}. Expected a path, or file://, s3://, gs://, "
            "abfs://, hdfs://, or another that an installed package gives to fsspec"
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
    """``name``, checked to be one part of a path, so that no ID leads out of its directory."""
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{what}={name!r}: expected the name of a file or directory, not empty and without '/'")
    return name


def local_below(root: str, name: str, source: str) -> str:
    """Return the path of ``name``, which a store has listed, below the local folder ``root``.

    Keys of object stores are any text: joined as they are, those of a stranger lead out of the folder.

    Raises:
        StoreError: ``name`` has "..", a backslash or a NUL in it, is absolute, or leads to the folder itself.
    """
    root = os.path.normpath(root)
    odd = "\\" in name or "\0" in name or ".." in name.split("/")
    local = root if odd or os.path.isabs(name) else os.path.normpath(os.path.join(root, name))
    if local == root or os.path.commonpath([root, local]) != root:
        raise StoreError(
            f"refusing {name!r} of {source}: expected the name of a file below that directory, without '..' and "
            "backslashes. We write no such name: delete it, and look who may write there"
        )
    return local


def temporary_name(name: str) -> str:
    """Return the name of an incomplete ``name``. Spark and pyarrow skip files that start with a dot."""
    return f".{name}.{uuid.uuid4().hex}.tmp"


def is_temporary(name: str) -> bool:
    """Return whether :func:`temporary_name` made this name."""
    return re.fullmatch(r"\..+\.[0-9a-f]{32}\.tmp", name, re.DOTALL) is not None
