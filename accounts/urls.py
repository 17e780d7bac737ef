"""Sign-in, the account and the keys."""

from django.urls import path
from django.views.generic import RedirectView

from accounts import account_pages, pages

urlpatterns = [
    path("", RedirectView.as_view(url="/app")),
    path("app/sign-in", account_pages.SignInPage.as_view(), name="sign-in"),
    path("app/sign-out", account_pages.SignOutPage.as_view(), name="sign-out"),
    path("app/sign-up", account_pages.sign_up_page, name="sign-up"),
    path("app/invitation/<str:token>", account_pages.invitation_page, name="invitation"),
    path("app/account", account_pages.account_page, name="account"),
    path("app/account/end-session", account_pages.end_session, name="end-session"),
    path("app/password", account_pages.PasswordPage.as_view(), name="password"),
    path("app/password/reset", account_pages.ResetPage.as_view(), name="reset"),
    path("app/password/reset/sent", account_pages.ResetSentPage.as_view(), name="reset-sent"),
    path("app/password/set/<uidb64>/<token>", account_pages.ResetConfirmPage.as_view(), name="set-password"),
    path("app/keys/new", pages.new_key, name="new-key"),
    path("app/keys/<int:key_id>", pages.key_page, name="key"),
    path("app/keys/<int:key_id>/pause", pages.pause_key, name="pause-key"),
    path("app/keys/<int:key_id>/resume", pages.resume_key, name="resume-key"),
    path("app/keys/<int:key_id>/revoke", pages.revoke_key, name="revoke-key"),
]
