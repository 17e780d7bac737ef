"""The names of everything the API and the inference workers keep in Redis."""


def queue(model: str) -> str:
    """The list in which a model's Completions wait for a worker."""
    return f"inference.{model}"


def replies(process: str) -> str:
    """The stream that carries the answers to one API process."""
    return f"acs:replies:{process}"


def alive(process: str) -> str:
    """There while an API process lives."""
    return f"acs:alive:{process}"


def worker(worker: str) -> str:
    """There while an inference worker lives; `worker` is its Engine row's id."""
    return f"acs:worker:{worker}"


# Whatever was drawn when Redis was empty. Another value means that Redis has lost all it had.
GENERATION = "acs:generation"


def control(model: str) -> str:
    """The stream of cancels and credits that every inference worker of a model reads."""
    return f"acs:control:{model}"


def cancelled(request_id: str) -> str:
    """The mark of a cancel, for a worker that takes the request after the cancel went by."""
    return f"acs:cancelled:{request_id}"


def count(request_id: str) -> str:
    """The tokens that a worker counted last for the request: `<prompt> <completion>`."""
    return f"acs:count:{request_id}"


def missing(process: str) -> str:
    """Since when a sweep has missed an API process, in milliseconds."""
    return f"acs:missing:{process}"


def pieces(request_id: str) -> str:
    """The pieces of work too large for one message."""
    return f"acs:work:{request_id}"


def published(request_id: str) -> str:
    """The mark that makes publishing again after a lost connection harmless: the number of the last sending."""
    return f"acs:published:{request_id}"
