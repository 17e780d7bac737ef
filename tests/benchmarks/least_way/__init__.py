"""The least that the design's way of a Completion can be: HTTP, Hold, Celery, engine, stream, settlement, and no more.

No key, rate, line, tokenizer, validation, log, logprobs or fault is looked after: what it adds to the engine is what
the parts themselves cost on this machine. `bench api` measures ours beside it.
"""
