"""The progress bars of a harvest, on standard error."""

import threading
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn

from acsinfra.client.models import HarvestJob
from acsinfra.client.run_state import Part, RunState
from acsinfra.client.watcher import Watcher


class ProgressBars(Watcher):
    """Three bars: jobs that are over, prompts that are read, and bytes that are downloaded."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console)
        self._jobs = self._progress.add_task("jobs", total=None)
        self._prompts = self._progress.add_task("prompts", total=None)
        self._bytes = self._progress.add_task("MB", total=0)
        self._lock = threading.Lock()
        self._prompts_done: dict[int, int] = {}
        self._parts: list[Part] = []
        self._planned_bytes = self._arrived_bytes = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    @property
    def tasks(self) -> list[Task]:
        """The three bars."""
        return self._progress.tasks

    def planned(self, state: RunState) -> None:
        """Set the totals."""
        self._parts = state.parts
        self._prompts_done = {part.first: part.n_prompts for part in state.parts if part.status == "done"}
        self._progress.update(self._prompts, total=state.n_prompts)
        self._show_jobs()

    def job_changed(self, part: Part, job: HarvestJob) -> None:
        """Move the first two bars."""
        self._prompts_done[part.first] = job.prompts_done
        self._show_jobs()

    def bytes_planned(self, count: int) -> None:
        """Lengthen the third bar."""
        with self._lock:
            self._planned_bytes += count
            self._show_bytes()

    def bytes_arrived(self, count: int) -> None:
        """Move the third bar."""
        with self._lock:
            self._arrived_bytes += count
            self._show_bytes()

    def said(self, text: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(text, markup=False, highlight=False)

    def _show_jobs(self) -> None:
        n_over = sum(part.status in ("done", "failed", "cancelled") for part in self._parts)
        self._progress.update(self._jobs, completed=n_over, total=len(self._parts))
        self._progress.update(self._prompts, completed=sum(self._prompts_done.values()))

    def _show_bytes(self) -> None:
        megabytes = (round(self._arrived_bytes / 1e6), round(self._planned_bytes / 1e6))
        self._progress.update(self._bytes, completed=megabytes[0], total=megabytes[1])
