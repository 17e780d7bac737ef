"""The guides: Markdown files in `docs/`, made into HTML once for a process."""

import functools
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

# In the order of reading.
SLUGS: Final = (
    "set-up",
    "first-completion",
    "logprobs",
    "jobs",
    "activations",
    "steering",
    "harvest",
    "projections",
    "budgets",
    "errors",
    "limits",
    "run-your-own",
)
FOLDER: Final[Path] = settings.BASE_DIR / "docs"
LEXERS: Final = {"sh": "bash", "python": "python", "json": "json"}
_FORMATTER: Final[HtmlFormatter[str]] = HtmlFormatter(nowrap=True)


_CODE: Final = (
    '<div class="code"><pre tabindex="0" role="region" aria-label="Code ({language})"><code>{code}</code></pre>'
    '<button type="button" class="quiet small js-only" data-copy aria-label="Copy the code">Copy</button></div>\n'
)


@dataclass(frozen=True)
class Heading:
    """A second-level heading: its text and the anchor that it has."""

    text: str
    anchor: str


@dataclass(frozen=True)
class Guide:
    """One guide: its place in the address, its title, its Markdown, and the page made of it."""

    slug: str
    title: str
    text: str
    html: str
    headings: tuple[Heading, ...]


@functools.cache
def guides() -> dict[str, Guide]:
    """Every guide by its slug, in the order of reading."""
    return {slug: _read(slug) for slug in SLUGS}


@functools.cache
def all_on_one_page() -> str:
    """Every guide as Markdown, one after the other."""
    about = (
        "# ACS Infra\n\n> A research API for base language models: Completions, residual streams, steering vectors and "
        "bulk harvests. `/openapi.json` describes every route, field and error.\n"
    )
    return "\n".join([about, *(_without_marks(guide.text) for guide in guides().values())])


def _read(slug: str) -> Guide:
    text = (FOLDER / f"{slug}.md").read_text(encoding="utf-8")
    markdown = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable("table")
    tokens = markdown.parse(text)
    headings: list[Heading] = []
    title = ""
    for opening, inline in pairwise(tokens):
        if opening.type != "heading_open":
            continue
        anchor = re.sub(r"[^a-z0-9]+", "-", inline.content.lower()).strip("-")
        opening.attrSet("id", anchor)
        if opening.tag == "h1":
            title = inline.content
        elif opening.tag == "h2":
            headings.append(Heading(inline.content, anchor))
    _label_cells(tokens)
    html = markdown.renderer.render(tokens, markdown.options, {})
    return Guide(slug, title, text, html, tuple(headings))


def _label_cells(tokens: list[Token]) -> None:
    """Give each cell of a table the name of its column, which a phone shows beside it."""
    names: list[str] = []
    column = 0
    for opening, inline in pairwise(tokens):
        if opening.type == "table_open":
            names = []
        elif opening.type == "th_open":
            names.append(inline.content)
        elif opening.type == "tr_open":
            column = 0
        elif opening.type == "td_open":
            opening.attrSet("data-label", names[column])
            column += 1


def _without_marks(text: str) -> str:
    """`text` without what says to the tests how to run a block."""
    return re.sub(r"^```(\w+) .*$", r"```\1", text, flags=re.MULTILINE)


class _Renderer(RendererHTML):
    """Code with classes for its colours and a button to copy it, and tables that scroll by themselves."""

    def fence(self, tokens: Any, index: int, options: Any, env: Any) -> str:
        """A block of code."""
        token = tokens[index]
        language = token.info.split(" ")[0]
        code = highlight(token.content, get_lexer_by_name(LEXERS[language]), _FORMATTER)
        return _CODE.format(language=language, code=code)

    def table_open(self, tokens: Any, index: int, options: Any, env: Any) -> str:
        """The beginning of a table."""
        return '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>\n'

    def table_close(self, tokens: Any, index: int, options: Any, env: Any) -> str:
        """The end of a table."""
        return "</table></div>\n"
