"""Objects in S3 through NIXL's OBJ plugin: ``nixl+s3://bucket/prefix?endpoint=...``.

Importing this package is cheap; NIXL and botocore load when a store is opened.
"""

from collections.abc import Mapping

from kvconnect.backend import Backend


def open_backend(location: str, options: Mapping[str, str]) -> Backend:
    """Open the store in ``bucket/prefix``; the caller closes it.

    Raises `ConfigError` for options that cannot be, `UnavailableError` where a library, the
    server or the bucket is missing, or the credentials are refused.
    """
    try:
        from kvconnect_nixl.s3.store import open_store  # noqa: PLC0415 - heavy, so late
    except ImportError as error:
        from kvconnect.errors import UnavailableError  # noqa: PLC0415

        raise UnavailableError(
            f"nixl+s3 needs {error.name}: {error}. Install it with pip install 'kvconnect[s3]'"
        ) from error
    return open_store(location, options)


__all__ = ["open_backend"]
