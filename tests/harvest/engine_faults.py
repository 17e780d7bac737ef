"""A plugin of vLLM's that makes an engine fail, or take long, where it reads a certain token.

`make_plugin` writes what vLLM finds it by; the tokens are in the environment of the process that is to have it.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

SLOW_SECONDS = 40.0


def make_plugin(folder: Path) -> Path:
    """Write the plugin's entry point into `folder`, which is then to be in PYTHONPATH."""
    info = folder / "acsinfra_faults-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acsinfra-faults\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nfaults = tests.harvest.engine_faults:install\n")
    return folder


def install() -> None:
    """Have every Llama raise at `FATAL_TOKEN` and its process die at `DEADLY_TOKEN`.

    At `SLOW_TOKEN` it sleeps, once it has made the file `SLOW_FILE`.
    """
    from vllm.model_executor.models.llama import LlamaForCausalLM

    fatal, deadly, slow = (int(os.environ[f"{name}_TOKEN"]) for name in ("FATAL", "DEADLY", "SLOW"))
    forward = LlamaForCausalLM.forward

    def fail_or_forward(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if bool((input_ids == fatal).any()):
            raise RuntimeError("a token that this engine cannot read")
        if bool((input_ids == deadly).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        if bool((input_ids == slow).any()):
            Path(os.environ["SLOW_FILE"]).touch()
            time.sleep(SLOW_SECONDS)
        return forward(self, input_ids, *args, **kwargs)

    LlamaForCausalLM.forward = fail_or_forward
