"""A worker on another host must not write to a folder that only has the same name."""

import shutil
from pathlib import Path

import pytest
from pytest_django import Settings

from acsinfra.core.shared_folder import FolderNotSharedError, record_storage_folder, require_shared_folder
from acsinfra.core.storage import MARKER_NAME, FolderStorage, get_storage
from acsinfra.models import StorageFolder

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, settings: Settings) -> Path:
    settings.STORAGE_URL = (tmp_path / "files").as_uri()
    return tmp_path / "files"


def become_another_host(folder: Path) -> None:
    """Put another folder where this one was, as another host would have it."""
    folder.rename(folder.with_name("of-the-api"))
    FolderStorage(folder).make_marker()


def test_before_the_api_wrote_anything_a_worker_may_start(folder: Path) -> None:
    require_shared_folder()
    assert not StorageFolder.objects.exists()
    assert not folder.exists()


def test_a_worker_with_the_same_folder_may_write(folder: Path) -> None:
    record_storage_folder()
    require_shared_folder()
    record_storage_folder()
    assert StorageFolder.objects.count() == 1
    assert (folder / MARKER_NAME).read_text() == StorageFolder.objects.get().marker


def test_a_worker_with_another_folder_of_the_same_name_is_refused(folder: Path) -> None:
    record_storage_folder()
    become_another_host(folder)
    for refused in (require_shared_folder, record_storage_folder):
        with pytest.raises(FolderNotSharedError, match="STORAGE_URL") as caught:
            refused()
        assert str(folder) not in str(caught.value)


def test_an_empty_folder_of_the_same_name_is_refused_and_left_empty(folder: Path) -> None:
    record_storage_folder()
    shutil.rmtree(folder)
    with pytest.raises(FolderNotSharedError):
        require_shared_folder()
    assert not folder.exists()


def test_a_folder_that_moved_with_its_files_stays_the_one(folder: Path, settings: Settings) -> None:
    record_storage_folder()
    folder.rename(folder.with_name("elsewhere"))
    settings.STORAGE_URL = folder.with_name("elsewhere").as_uri()
    record_storage_folder()
    require_shared_folder()


def test_the_first_of_two_markers_wins(folder: Path) -> None:
    storage = get_storage()
    assert isinstance(storage, FolderStorage)
    assert storage.marker() is None
    first = storage.make_marker()
    assert storage.make_marker() == storage.marker() == first
    assert [path.name for path in folder.iterdir()] == [MARKER_NAME]


def test_s3_is_the_same_for_everyone(settings: Settings) -> None:
    settings.STORAGE_URL = "s3://bucket?endpoint=http://127.0.0.1:1"
    record_storage_folder()
    require_shared_folder()
    assert not StorageFolder.objects.exists()
