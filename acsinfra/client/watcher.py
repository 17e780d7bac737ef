"""What a harvest tells whoever shows how far it is."""

from acsinfra.client.models import HarvestJob
from acsinfra.client.run_state import Part, RunState


class Watcher:
    """What a harvest tells whoever shows it; the methods of this one do nothing. Downloads call from their threads."""

    def planned(self, state: RunState) -> None:
        """The harvest begins, or goes on, with these parts (and again when one was split)."""

    def job_changed(self, part: Part, job: HarvestJob) -> None:
        """A job was submitted or looked at."""

    def bytes_planned(self, count: int) -> None:
        """So many more bytes are to be downloaded."""

    def bytes_arrived(self, count: int) -> None:
        """So many bytes are there; fewer than none where a file begins again."""

    def said(self, text: str) -> None:
        """Something worth a line."""
