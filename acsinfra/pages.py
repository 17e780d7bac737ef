"""The pages that anyone may read: the reference, the guides, and both on one page for a language model."""

from django.views.generic import TemplateView


class ReferencePage(TemplateView):
    """`/docs`: the OpenAPI document, browsable, with no outside network."""

    template_name = "docs/reference.html"
