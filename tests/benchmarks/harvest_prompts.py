"""The prompts of `bench harvest`: whole texts and their beginnings, ragged on purpose."""

import itertools
from pathlib import Path

from acsinfra.quickstart.supervisor import PROJECT

TEXTS = PROJECT / "acsinfra" / "quickstart" / "texts.txt"


def make_prompts(count: int) -> list[str]:
    """Return `count` texts of a quarter to the whole of a paragraph."""
    texts = [text.strip() for text in Path(TEXTS).read_text().split("\n\n") if text.strip()]
    return [text[: len(text) * (1 + i % 4) // 4] for i, text in zip(range(count), itertools.cycle(texts), strict=False)]
