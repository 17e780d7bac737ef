"""Every route. The API's live in their apps; what none of them matches below /v1 is a JSON 404."""

from django.contrib import admin
from django.templatetags.static import static
from django.urls import include, path, re_path, register_converter
from django.views.generic import RedirectView

from acsinfra import pages
from acsinfra.core import views
from acsinfra.core.file_links import serve_link
from acsinfra.core.ids import AnyCaseUUIDConverter

handler500 = "acsinfra.core.bare_pages.server_error"

register_converter(AnyCaseUUIDConverter, "any_uuid")

urlpatterns = [
    # First, because Django tries the patterns one by one, and this is the route that must be quick.
    path("", include("inference.urls")),
    path("healthz", views.healthz),
    path("readyz", views.readyz),
    path("files/<str:token>/<str:name>", serve_link),
    path("openapi.json", views.openapi),
    path("docs", pages.ReferencePage.as_view(), name="reference"),
    path("docs/guide", pages.GuidesPage.as_view(), name="guides"),
    path("docs/guide/<slug:slug>", pages.GuidePage.as_view(), name="guide"),
    path("llms.txt", pages.llms_txt, name="llms-txt"),
    path("v1/chat/completions", views.ChatCompletionsView.as_view()),
    path("", include("budgets.urls")),
    path("", include("harvest.urls")),
    path("", include("jobs.urls")),
    re_path(r"^(?:v1|files)(?:/|$)", views.unknown_route),
    path("admin/", admin.site.urls),
    path("", include("accounts.urls")),
    # What people type, and what browsers ask for where a page names no icon: of a JSON document, say.
    path("admin", RedirectView.as_view(url="/admin/")),
    re_path(r"^(?P<page>(?:app|docs)(?:/.*[^/])?)/+$", RedirectView.as_view(url="/%(page)s", query_string=True)),
    path("favicon.ico", RedirectView.as_view(url=static("acsinfra/icon.svg"))),
]
