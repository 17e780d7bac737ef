"""That every process writes to the same storage folder, not to one of the same name on another host.

The API records the marker of its folder in the database; a worker compares. S3 is the same bucket for everyone.
"""

import socket

from django.apps import apps
from django.conf import settings

from acsinfra.core.storage import FolderStorage, StorageError, get_storage


class FolderNotSharedError(StorageError):
    """This process sees another folder than the API does."""


def record_storage_folder() -> None:
    """Make and record the folder's marker, once for a `STORAGE_URL`. Raises FolderNotSharedError for another folder."""
    storage = get_storage()
    if not isinstance(storage, FolderStorage):
        return
    rows = apps.get_model("acsinfra", "StorageFolder").objects
    if not rows.filter(url=settings.STORAGE_URL).exists():
        rows.get_or_create(
            url=settings.STORAGE_URL, defaults={"marker": storage.make_marker(), "host": socket.gethostname()}
        )
    require_shared_folder()


def require_shared_folder() -> None:
    """FolderNotSharedError unless this process's folder is the one that the API recorded, if it did already."""
    storage = get_storage()
    if not isinstance(storage, FolderStorage):
        return
    recorded = apps.get_model("acsinfra", "StorageFolder").objects.filter(url=settings.STORAGE_URL).first()
    if recorded is not None and recorded.marker != storage.marker():
        raise FolderNotSharedError(
            f"The storage folder on {socket.gethostname()} is not the one that the API on {recorded.host} writes to. "
            "Share that folder with this host, or name an S3 bucket or another folder in STORAGE_URL."
        )
