"""Where the seconds of a run go."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """Seconds of a run by what the runner was doing; `total_s` since it began."""

    load_s: float = 0.0
    forward_s: float = 0.0
    save_s: float = 0.0
    upload_s: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @contextmanager
    def measure(self, name: str, *, instead_of: str | None = None) -> Iterator[None]:
        """Add the block's seconds to `name`; take them from `instead_of`, in whose block it lies."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            setattr(self, name, getattr(self, name) + seconds)
            if instead_of is not None:
                setattr(self, instead_of, getattr(self, instead_of) - seconds)

    def timings(self) -> dict[str, float]:
        """The seconds so far as a result has them; they add up to the run's."""
        known = {name: getattr(self, name) for name in ("load_s", "forward_s", "save_s", "upload_s")}
        known["other_s"] = max(0.0, time.monotonic() - self.began - sum(known.values()))
        return {name: round(seconds, 3) for name, seconds in known.items()}
