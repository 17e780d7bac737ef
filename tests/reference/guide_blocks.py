"""The code blocks of the guides, as the tests run them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from acsinfra.guides import guides

FENCE: Final = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code; `mark` says what it is: `setup`, `cluster`, or the schema of an answer."""

    guide: str
    language: str
    mark: str
    text: str


def blocks() -> Iterator[Block]:
    """Yield every block of every guide."""
    for guide in guides().values():
        for language, mark, text in FENCE.findall(guide.text):
            yield Block(guide.slug, language, mark, text)


def script_of(guide: str, language: str) -> str:
    """Return the blocks of a guide in `language` that run, one after the other."""
    return "".join(
        block.text for block in blocks() if (block.guide, block.language, block.mark) == (guide, language, "")
    )
