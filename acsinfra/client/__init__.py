"""The researchers' client: Completions, Jobs and harvests over HTTP. Imports neither Django nor torch nor vLLM."""

import httpx
import numpy

__all__ = ["httpx", "numpy"]
