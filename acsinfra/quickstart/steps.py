"""Progress on standard error: a line for each step with its seconds, and never a silent minute."""

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

PERCENT = re.compile(r"^(?P<text>.*?):? (?P<percent>\d+) %$")
SIGN_OF_LIFE_SECONDS = 10.0


class Steps:
    """The steps of a start. `seconds` has what each took.

    On a terminal the running steps move (with a bar where a share is known); elsewhere each step prints a line when
    it begins and when it is done, and every ten seconds in between.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.monotonic()
        self._running: dict[str, RunningStep] = {}
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._ended = threading.Event()
        if sys.stderr.isatty():
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                console=Console(stderr=True, highlight=False),
            )
            self._progress.start()
        else:
            threading.Thread(target=self._show_life, daemon=True).start()

    @contextmanager
    def step(self, name: str, text: str) -> Iterator["RunningStep"]:
        """Show `text` while the block runs, and keep its seconds under `name`. Steps may overlap."""
        step = self.begin(name, text)
        try:
            yield step
        except BaseException:
            step.forget()
            raise
        step.done()

    def begin(self, name: str, text: str) -> "RunningStep":
        """Start a step that ends elsewhere, by its `done`."""
        task = self._progress.add_task(text, total=None) if self._progress else None
        step = RunningStep(self, name, text, task)
        with self._lock:
            self._running[name] = step
        if not self._progress:
            self.say(f"  {text} …")
        return step

    def say(self, line: str) -> None:
        """Print a line beside the steps."""
        if self._progress:
            self._progress.console.print(line, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    def end(self) -> None:
        """Show no more; `seconds` gets the `total`."""
        if not self._ended.is_set():
            self.seconds["total"] = round(time.monotonic() - self._started, 2)
            self._ended.set()
            if self._progress:
                self._progress.stop()

    def _finish(self, step: "RunningStep", *, succeeded: bool) -> None:
        with self._lock:
            self._running.pop(step.name, None)
        if succeeded:
            self.seconds[step.name] = round(step.elapsed(), 2)
        if self._progress and step.task is not None:
            self._progress.remove_task(step.task)
        if succeeded:
            self.say(f"✓ {step.text} ({step.elapsed():.1f} s)")

    def _show(self, step: "RunningStep") -> None:
        if self._progress and step.task is not None:
            match = PERCENT.match(step.news)
            if match:
                self._progress.update(step.task, description=match["text"], total=100, completed=int(match["percent"]))
            else:
                self._progress.update(step.task, description=f"{step.text}: {step.news}")

    def _show_life(self) -> None:
        while not self._ended.wait(SIGN_OF_LIFE_SECONDS):
            with self._lock:
                running = list(self._running.values())
            for step in running:
                if step.elapsed() > SIGN_OF_LIFE_SECONDS / 2:
                    news = f": {step.news}" if step.news else ""
                    self.say(f"  {step.text}{news} … ({step.elapsed():.0f} s)")


class RunningStep:
    """A step that has begun. `news` is what it does just now."""

    def __init__(self, steps: Steps, name: str, text: str, task: TaskID | None) -> None:
        self.name, self.text, self.task = name, text, task
        self.news = ""
        self._steps = steps
        self._started = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._started

    def note(self, news: str) -> None:
        """Say what it does just now; ` NN %` at the end moves its bar."""
        if news and news != self.news:
            self.news = news
            self._steps._show(self)

    def done(self) -> None:
        """End it and keep its seconds."""
        self._steps._finish(self, succeeded=True)

    def forget(self) -> None:
        """End it without success."""
        self._steps._finish(self, succeeded=False)
