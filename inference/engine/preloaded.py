"""What the fork server imports: all that an engine's process imports until it serves."""

import gc
import importlib

from inference.engine.importing import ENGINE_IMPORTS, without_collections

with without_collections():
    for name in ENGINE_IMPORTS:
        importlib.import_module(name)
# A process that is forked from here would copy each page that a collection writes to.
gc.freeze()
