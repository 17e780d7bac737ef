"""Convert a GGUF to a folder of bfloat16 safetensors: `python -m inference.engine.convert_gguf FILE FOLDER`.

Prints percents on standard output. Ends at once when its standard input closes, so that it never outlives its parent.
"""

import functools
import os
import sys
import threading
from pathlib import Path
from typing import Any


def convert_gguf(file: Path, target: Path) -> None:
    """Write `file`'s weights (dequantised, bfloat16), config and tokenizer to `target`."""
    import gguf as gguf_library
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers import modeling_gguf_pytorch_utils as gguf_utils

    _say(10)
    # transformers 5.19 reads the file anew for each of tokenizer, config and weights, and builds the map of names for
    # each module: half of the conversion's time.
    gguf_library.GGUFReader = functools.cache(gguf_library.GGUFReader)
    gguf_library.get_tensor_name_map = functools.cache(gguf_library.get_tensor_name_map)
    gguf_utils.tqdm = _PercentBar
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    _say(35)
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # save_pretrained refuses a model that came out of a GGUF (transformers 5), so a fresh one takes its weights.
    fresh = type(loaded)(type(loaded.config).from_dict(_plain_config(loaded.config.to_dict()))).to(torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = loaded.generation_config
    _say(95)
    fresh.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _say(100)


def _plain_config(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("quantization_config", "_name_or_path")}


def _say(percent: int) -> None:
    print(percent, flush=True)  # noqa: T201


class _PercentBar:
    """Stands in for tqdm in transformers' GGUF reader: the tensors are from 40 to 90 % of the whole."""

    def __init__(self, iterable: Any, **_options: Any) -> None:
        self._items = list(iterable)

    def __iter__(self) -> Any:
        said = 40
        for index, item in enumerate(self._items):
            yield item
            percent = 40 + 50 * (index + 1) // len(self._items)
            if percent >= said + 5:
                said = percent
                _say(said)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
