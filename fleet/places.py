"""Where a store may lie: in a folder, or behind a URL. What is nearly a URL is refused, for it would be a folder."""

from __future__ import annotations

import re
from pathlib import Path

from ..runtime.errors import InvalidArgumentError

_SCHEMES = {
    *("abfs", "abfss", "adl", "az", "file", "ftp", "gcs", "gs", "hdfs", "http", "https", "local", "memory"),
    *("obs", "oci", "oss", "s3", "s3a", "sftp", "smb", "ssh", "tos", "webdav", "webhdfs"),
}
# s3:/bucket, s3:bucket, s3//bucket, s3;//bucket
_NEARLY = re.compile(r"([A-Za-z][A-Za-z0-9+-]+)(:/|:|//|[;,.]//?)([^/].*)", re.DOTALL)
_FOLDER_SCHEMES = ("file", "local")


def is_url(text: str, what: str) -> bool:
    """Return whether this is a URL; else it is a folder's path.

    what : how an error calls it: "--remote"
    raises InvalidArgumentError for what is nearly a URL, and for file:// with a path that is not absolute
    """
    scheme, found, rest = text.partition("://")
    if found:
        if scheme in _FOLDER_SCHEMES and not rest.startswith("/"):
            raise InvalidArgumentError(
                f"{what} {text} has no absolute path; did you mean {scheme}://{_absolute(rest)}?"
            )
        return True
    nearly = _NEARLY.fullmatch(text)
    if nearly is None or not (nearly[2] == ":/" or nearly[1].lower() in _SCHEMES):
        return False
    meant = nearly[1].lower() + "://" + ("/" if nearly[1].lower() in _FOLDER_SCHEMES else "") + nearly[3]
    raise InvalidArgumentError(
        f"{what} {text} is no URL, and looks like one; did you mean {meant}? A folder of that name is ./{text}"
    )


def _absolute(rest: str) -> str:
    if rest.startswith(("~", ".")):
        return str(Path(rest).expanduser().absolute())
    return f"/{rest.removeprefix('localhost/')}"
