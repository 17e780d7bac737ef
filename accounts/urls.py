"""Sign-in and the App's first page."""

from django.contrib.auth.views import LogoutView
from django.urls import path
from django.views.generic import RedirectView

from accounts import pages

urlpatterns = [
    path("", RedirectView.as_view(url="/app")),
    path("app", pages.HomePage.as_view(), name="app"),
    path("app/sign-in", pages.SignInPage.as_view(), name="sign-in"),
    path("app/sign-out", LogoutView.as_view(), name="sign-out"),
]
