"""Long computations off the event loop."""

import asyncio
from collections.abc import Callable


async def in_thread_if[**P, R](is_long: bool, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`work(...)`, in a thread where `is_long`, here where a thread's start would cost more than the work."""
    if is_long:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)
