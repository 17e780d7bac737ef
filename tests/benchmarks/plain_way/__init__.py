"""A plain build of a Completion's way: HTTP, Hold, Celery, engine, stream, settlement, written straight down.

No key, rate, line, tokenizer, validation, log, logprobs or fault is looked after, and nothing is made quick. `bench
api` measures ours beside it: what such a way adds to the engine on this machine, by the parts that everybody would
take.
"""
