"""What can go wrong with an engine: a request, the engine's process, or its start."""


class RequestFault(Exception):
    """One request failed in the engine; the engine itself is well and serves the others."""


class EngineDied(Exception):
    """The engine is gone; every request that it held is lost."""


class EngineRefused(Exception):
    """The engine will not serve this checkpoint or these options; the message is one sentence that says why."""
