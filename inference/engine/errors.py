"""What can go wrong with an engine: a request, the engine's process, or its start."""

from collections.abc import Sequence


class RequestFault(Exception):
    """One request failed in the engine; the engine itself is well and serves the others."""


class EngineDied(Exception):
    """The engine is gone; every request that it held is lost.

    `prompts` are the callers' indexes of what a harvest engine held: one of them may be the reason.
    """

    def __init__(self, message: str, *, prompts: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.prompts = tuple(prompts)


class EngineRefused(Exception):
    """The engine will not serve this checkpoint or these options; the message is one sentence that says why."""
