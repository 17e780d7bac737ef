"""The pages that anyone may read: the reference, the guides, and all guides on one page."""

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.views.generic import TemplateView

from acsinfra.guides import all_on_one_page, guides


class ReferencePage(TemplateView):
    """`/docs`: the OpenAPI document, browsable, with no outside network."""

    template_name = "docs/reference.html"


class GuidesPage(TemplateView):
    """`/docs/guide`: what there is to read."""

    template_name = "docs/guides.html"

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """The guides."""
        return super().get_context_data(guides=guides().values(), **kwargs)


class GuidePage(TemplateView):
    """One guide."""

    template_name = "docs/guide.html"

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """The guide, and those before and after it."""
        every = list(guides().values())
        guide = guides().get(kwargs["slug"])
        if guide is None:
            raise Http404
        place = every.index(guide)
        return super().get_context_data(
            guides=every,
            guide=guide,
            before=every[place - 1] if place else None,
            after=every[place + 1] if place + 1 < len(every) else None,
            **kwargs,
        )


def llms_txt(request: HttpRequest) -> HttpResponse:
    """`/llms.txt`: all guides on one page."""
    return HttpResponse(all_on_one_page(), content_type="text/plain; charset=utf-8")
