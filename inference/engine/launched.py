"""What a launcher imports (see `acsinfra.quickstart.launcher`): all that the process around an engine imports.

The environment comes first, as vLLM and OpenMP read theirs as they are imported.
"""

import importlib

from inference.engine.environment import prepare_launcher

prepare_launcher()
importlib.import_module("inference.engine.preloaded")
