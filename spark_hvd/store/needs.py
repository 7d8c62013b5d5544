"""Advice on each kind of store: the package and settings that every host needs, and the form of paths."""

from __future__ import annotations

from typing import NamedTuple


class _Kind(NamedTuple):
    package: str
    settings: str
    example: str


_S3 = _Kind("s3fs", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "s3://bucket/fits")
_GS = _Kind("gcsfs", "GOOGLE_APPLICATION_CREDENTIALS", "gs://bucket/fits")
_ABFS = _Kind("adlfs", "AZURE_STORAGE_ACCOUNT_KEY", "abfss://container@account.dfs.core.windows.net/fits")
_HDFS = _Kind("hdfs-native", "HADOOP_CONF_DIR", "hdfs://namenode:8020/fits")
_KINDS = {"s3": _S3, "s3a": _S3, "s3n": _S3, "gs": _GS, "gcs": _GS, "abfs": _ABFS, "abfss": _ABFS, "az": _ABFS}
_KINDS |= {"hdfs": _HDFS}


def to_install(url: str) -> str | None:
    """Return the command that installs the package for ``url``, and what else it needs; None if unknown."""
    kind = _KINDS.get(url.partition("://")[0].lower())
    return kind and f"pip install {kind.package}, on every host of the cluster. {expected(url)}"


def expected(url: str) -> str:
    """Return the form of paths and the settings for the store of ``url``; "" if unknown."""
    kind = _KINDS.get(url.partition("://")[0].lower())
    if kind is None:
        return ""
    return f"Expected a path such as {kind.example}, and {kind.settings} on every host, or storage_options"
