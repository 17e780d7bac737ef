"""How the pages show numbers: durations, bytes, tokens of text."""

from django import template
from django.utils.html import format_html_join
from django.utils.safestring import SafeString

register = template.Library()


@register.filter
def duration(seconds: float | None) -> str:
    """`0.42 s`, `12 s`, `3 min 20 s`, `2 h 5 min`; an empty text for None."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.01 else "under 10 ms"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


@register.filter
def size(n_bytes: int | None) -> str:
    """`512 B`, `1.4 MiB`; an empty text for None."""
    if n_bytes is None:
        return ""
    value, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"


@register.filter
def visible(token: str) -> str:
    """A token whose line breaks and tabs can be seen: a lone newline would look like nothing."""
    return token.replace("\n", "↵\n").replace("\t", "⇥\t")


@register.filter
def breakable(name: str) -> SafeString:
    """A name such as `output_residual_stream`, which may break after each of its words where there is little room."""
    *words, last = name.split("_")
    return format_html_join("", "{}<wbr>", [(f"{word}_",) for word in words]) + format_html_join("", "{}", [(last,)])
