"""Signing in and up, the password, and the sessions of an account."""

from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth import login
from django.contrib.auth import views as auth_views
from django.contrib.auth.decorators import login_required
from django.core.exceptions import ValidationError
from django.forms import Form
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse, reverse_lazy
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_safe

from accounts import invitations
from accounts.forms import AccountForm, ResetForm, SignInForm
from accounts.pages import posted_from, signed_in
from accounts.sign_ins import end_sign_ins, note_sign_in, sign_ins_of
from accounts.throttle import may_go_on
from acsinfra.core.file_links import base_url

HOUR = 3600
TRIES_AN_HOUR = 20
PASSWORD_BACKEND = "django.contrib.auth.backends.ModelBackend"  # noqa: S105 (a name)
# How much of a session's key names it in a form: too little to use it by.
SESSION_NAME_CHARACTERS = 12


class SignInPage(auth_views.LoginView):
    """Name and password."""

    template_name = "accounts/sign_in.html"
    authentication_form = SignInForm
    redirect_authenticated_user = True

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        """Whether there is a way to an account from here."""
        return super().get_context_data(may_sign_up=settings.SIGN_UP == "approval", **kwargs)


class SignOutPage(auth_views.LogoutView):
    """Ends the session; who only looks at the address is shown the App."""

    http_method_names = ["get", "post", "options"]

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Nothing ends by a link that is followed."""
        return redirect("app")


# Beginning an account


@never_cache
@sensitive_post_parameters()
@require_http_methods(["GET", "POST"])
def sign_up_page(request: HttpRequest) -> HttpResponse:
    """Ask for an account, which an operator approves; only where the setting SIGN_UP says so."""
    if settings.SIGN_UP != "approval":
        raise Http404("sign-up is closed")
    if request.user.is_authenticated:
        return redirect("app")
    form = AccountForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        if not may_go_on(request, "sign-up", times=TRIES_AN_HOUR, seconds=HOUR):
            form.add_error(None, "Too many tries from your address. Wait an hour.")
        else:
            try:
                url = f"{base_url(request)}{reverse('admin:accounts_user_changelist')}?awaits_approval__exact=1"
                invitations.ask_for_account(**form.cleaned_data, operators_url=url)
            except ValidationError as error:
                _add_errors(form, error)
            else:
                return render(request, "accounts/asked.html")
    return render(request, "accounts/sign_up.html", {"form": form, "invitation": None})


@never_cache
@sensitive_post_parameters()
@require_http_methods(["GET", "POST"])
def invitation_page(request: HttpRequest, token: str) -> HttpResponse:
    """Make the account that an invitation is for, and sign it in."""
    invitation = invitations.find_invitation(token) if settings.SIGN_UP != "closed" else None
    if invitation is None:
        return render(request, "accounts/invitation_over.html", status=404)
    initial = {"email": invitation.email}
    form = AccountForm(request.POST or None, initial=initial)
    if request.method == "POST" and form.is_valid():
        try:
            user = invitations.accept_invitation(token=token, **form.cleaned_data)
        except ValidationError as error:
            _add_errors(form, error)
        else:
            login(request, user, backend=PASSWORD_BACKEND)
            return redirect("app")
    return render(request, "accounts/sign_up.html", {"form": form, "invitation": invitation})


def _add_errors(form: Form, error: ValidationError) -> None:
    """The faults of a model at the form's fields, those of fields that it lacks at the whole of it."""
    if not hasattr(error, "error_dict"):
        form.add_error(None, error)
        return
    for field, faults in error.error_dict.items():
        form.add_error(field if field in form.fields else None, faults)


# The account


@login_required
@never_cache
@require_safe
def account_page(request: HttpRequest) -> HttpResponse:
    """Who one is here, and where one is signed in."""
    here = request.session.session_key
    sessions = [
        {"sign_in": one, "name": one.pk[:SESSION_NAME_CHARACTERS], "is_here": one.pk == here}
        for one in sign_ins_of(signed_in(request))
    ]
    return render(request, "accounts/account.html", {"sessions": sessions})


@posted_from("account")
def end_session(request: HttpRequest) -> HttpResponse:
    """End one session of the User, or all but this one."""
    user, name = signed_in(request), request.POST.get("session", "")
    if len(name) == SESSION_NAME_CHARACTERS and name.isalnum():
        ended = end_sign_ins(user=user, only=name)
    else:
        ended = end_sign_ins(user=user, but=request.session.session_key)
    messages.success(request, "No other session was there." if not ended else f"Ended: {ended}.")
    return redirect("account")


@method_decorator(never_cache, name="dispatch")
class PasswordPage(auth_views.PasswordChangeView):
    """Change the password; every other session ends."""

    template_name = "accounts/password.html"
    success_url = reverse_lazy("account")

    def form_valid(self, form: Any) -> HttpResponse:
        """Save it, and note this session under its new key."""
        response = super().form_valid(form)
        user = signed_in(self.request)
        note_sign_in(request=self.request, user=user)
        end_sign_ins(user=user, but=self.request.session.session_key)
        messages.success(self.request, "Your password is changed; your other sessions are ended.")
        return response


@method_decorator(never_cache, name="dispatch")
class ResetPage(auth_views.PasswordResetView):
    """Ask for a link by mail; the answer is the same whether the address is known or not."""

    template_name = "accounts/reset.html"
    email_template_name = "accounts/mail/reset.txt"
    subject_template_name = "accounts/mail/reset_subject.txt"
    form_class = ResetForm
    success_url = reverse_lazy("reset-sent")

    def form_valid(self, form: Any) -> HttpResponse:
        """Send it, unless this address asked too often."""
        if not may_go_on(self.request, "reset", times=TRIES_AN_HOUR, seconds=HOUR):
            form.add_error(None, "Too many tries from your address. Wait an hour.")
            return self.form_invalid(form)
        self.extra_email_context = {"base": base_url(self.request)}
        return super().form_valid(form)


class ResetSentPage(auth_views.PasswordResetDoneView):
    """What to do next."""

    template_name = "accounts/reset_sent.html"


class ResetConfirmPage(auth_views.PasswordResetConfirmView):
    """Set a new password by the link of the mail; every session ends."""

    template_name = "accounts/reset_confirm.html"
    success_url = reverse_lazy("sign-in")

    def form_valid(self, form: Any) -> HttpResponse:
        """Save it."""
        response = super().form_valid(form)
        end_sign_ins(user=form.user)
        messages.success(self.request, "Your password is set. Sign in with it.")
        return response
