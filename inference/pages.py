"""The Workbench: a page that sends requests of the API from the App, and the doors through which they come.

A door is the API's own view under a path of the App, where the session says who asks and Django checks the CSRF token.
So the Workbench has every check, bound, Hold and charge of `POST /v1/completions`; the ledger says `app`.
"""

from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.contrib.auth.mixins import LoginRequiredMixin
from django.http.response import HttpResponseBase
from django.views.generic import TemplateView
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.authentication import SessionAuthentication
from inference.views import CompletionsView, ModelsView


class WorkbenchPage(LoginRequiredMixin, TemplateView):
    """Prompt, settings, stream, logprobs, steering by two prompts; its script asks through the doors below."""

    template_name = "workbench/workbench.html"

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """The address of the API, for the request as code."""
        base = settings.PUBLIC_URL or self.request.build_absolute_uri("/").rstrip("/")
        return super().get_context_data(api_base=f"{base}/v1", **kwargs)


class WorkbenchModelsView(ModelsView):
    """`GET /v1/models` by the session."""

    authentication_classes = (SessionAuthentication,)

    @extend_schema(exclude=True)
    async def get(self, request: Request) -> Response:
        """List the Base models."""
        answer: Response = await super().get(request)
        return answer


class WorkbenchCompletionsView(CompletionsView):
    """`POST /v1/completions` by the session, charged to the User's Budget without a key."""

    authentication_classes = (SessionAuthentication,)

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Callable[..., HttpResponseBase]:
        """The view, with the CSRF check that DRF's views go without: browsers send a session by themselves."""
        view: Any = super().as_view(**initkwargs)
        view.csrf_exempt = False
        return view  # type: ignore[no-any-return]

    @extend_schema(exclude=True)
    async def post(self, request: Request) -> HttpResponseBase:
        """Complete the prompts."""
        answer: HttpResponseBase = await super().post(request)
        return answer
