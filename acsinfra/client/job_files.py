"""The files of done jobs, downloaded in the background, several at once."""

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx

from acsinfra.client.downloads import FileDownload, RemoteFile, files_client
from acsinfra.client.errors import CONNECTION_FAILED, HARVEST_INCOMPLETE, INVALID_ANSWER, STILL_WAITING, AcsError
from acsinfra.client.models import Json
from acsinfra.client.run_state import Part
from acsinfra.client.watcher import Watcher

if TYPE_CHECKING:
    from acsinfra.client.client import Client

MANIFEST: Final = "manifest.json"
STATISTICS: Final = "stats.safetensors"
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class Downloads:
    """The downloads of done jobs, several files at once. A block with it ends when they do, or all stop at an error."""

    def __init__(self, client: "Client", watcher: Watcher, n_connections: int) -> None:
        self._client = client
        self._watcher = watcher
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(n_connections, thread_name_prefix="download")
        self._http = files_client(n_connections)
        self._jobs: list[_JobDownload] = []

    def __enter__(self) -> "Downloads":
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        self._http.close()

    @property
    def is_busy(self) -> bool:
        """Whether a job's files are still to come."""
        return bool(self._jobs)

    def begin(self, job_id: str, folder: Path, *, statistics_only: bool, part: Part) -> None:
        """Read the job's manifest, and begin to download its files into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        links = _Links(self._client, job_id)
        manifest = _read_manifest(self._client, self._http, links)
        files = _files_of(manifest, links)
        if statistics_only:
            files = [file for file in files if file.name == STATISTICS]
        self._watcher.bytes_planned(sum(file.bytes for file in files))
        futures = [self._pool.submit(self._run_one, file, folder) for file in files]
        self._jobs.append(_JobDownload(part, folder, manifest, futures))

    def finished(self, *, wait_s: float) -> list[tuple[Part, AcsError | None]]:
        """The parts whose downloads ended since the last call, each with its error; waits up to `wait_s` for one.

        Raises OSError where a file cannot be written: a full disk is no matter of one part.
        """
        if wait_s and (open_ones := [future for job in self._jobs for future in job.futures if not future.done()]):
            wait(open_ones, timeout=wait_s, return_when=FIRST_COMPLETED)
        ended = []
        for job in list(self._jobs):
            failures = [future.exception() for future in job.futures if future.done() and future.exception()]
            errors = [failure for failure in failures if isinstance(failure, AcsError)]
            for failure in failures:
                if failure is not None and not isinstance(failure, AcsError):
                    raise failure
            if all(future.done() for future in job.futures):
                if not errors:
                    # Last: where it is, the job's files are whole.
                    (job.folder / f"{MANIFEST}.part").write_bytes(job.manifest)
                    (job.folder / f"{MANIFEST}.part").replace(job.folder / MANIFEST)
                self._jobs.remove(job)
                ended.append((job.part, errors[0] if errors else None))
        return ended

    def _run_one(self, file: RemoteFile, folder: Path) -> None:
        FileDownload(
            self._http,
            file,
            folder,
            patience_s=self._client.patience_s,
            stop=self._stop,
            on_bytes=self._watcher.bytes_arrived,
        ).run()


@dataclass(frozen=True, eq=False)
class _JobDownload:
    part: Part
    folder: Path
    manifest: bytes
    futures: list[Future[None]]


class _Links:
    """The links of a done job; made new by asking for the job again."""

    def __init__(self, client: "Client", job_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._lock = threading.Lock()
        self._made_at = 0.0
        self._result: Json = {}

    def result(self, *, is_renewed: bool) -> Json:
        """The job's result. Raises AcsError where its files are gone."""
        asked_at = time.monotonic()
        with self._lock:
            # Of several threads that found a link over, one asks.
            if not self._result or (is_renewed and self._made_at < asked_at):
                job = self._client.harvest_job(self._job_id)
                if not job.is_ended:
                    message = f"Harvest job {self._job_id} is {job.status}: wait for it first."
                    raise AcsError(message, code=STILL_WAITING, body=job.raw)
                if job.result is None:
                    message = f"The files of job {self._job_id} ({job.status}) are not on the server any more."
                    raise AcsError(message, code=HARVEST_INCOMPLETE)
                self._result, self._made_at = job.result, time.monotonic()
            return self._result


def _read_manifest(client: "Client", http: httpx.Client, links: _Links) -> bytes:
    deadline = time.monotonic() + client.patience_s
    is_renewed = False
    while True:
        link = links.result(is_renewed=is_renewed)["manifest_url"]
        try:
            answer = http.get(link)
            if answer.status_code == 200:
                return answer.content
            is_renewed, problem = True, f"the file storage answered {answer.status_code}"
        except httpx.TransportError as failure:
            problem = str(failure) or type(failure).__name__
        if time.monotonic() > deadline:
            raise AcsError(f"The manifest cannot be downloaded: {problem}.", code=CONNECTION_FAILED)
        time.sleep(1.0)


def _files_of(manifest: bytes, links: _Links) -> list[RemoteFile]:
    """The files that a manifest names, statistics first. Raises AcsError where it and the links do not agree."""
    try:
        read = json.loads(manifest)
        shards, stats = read["shards"], read["stats"]
        if len(shards) != len(links.result(is_renewed=False)["shard_urls"]):
            raise ValueError("it has not as many shards as the job")
        files = [_remote(stats, STATISTICS, lambda renewed: str(links.result(is_renewed=renewed)["stats_url"]))]
        for number, shard in enumerate(shards):
            files.append(_remote(shard, shard["key"].rpartition("/")[2], _shard_link(links, number)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AcsError(f"The manifest cannot be read: {error}", code=INVALID_ANSWER) from error
    return files


def _shard_link(links: _Links, number: int) -> Callable[[bool], str]:
    return lambda renewed: str(links.result(is_renewed=renewed)["shard_urls"][number])


def _remote(entry: Json, name: str, find_link: Callable[[bool], str]) -> RemoteFile:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no file name")
    return RemoteFile(name, int(entry["bytes"]), str(entry["sha256"]), find_link)
