"""The pages of API keys: making one, which shows it once, and what can be done with it after."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import redirect_to_login
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_http_methods

from accounts import services
from accounts.forms import KeyForm, initial_of
from accounts.models import ApiKey, User
from accounts.selectors import keys_of
from acsinfra.core.file_links import base_url

KEYS_AT_MOST = 200
SETUP = """export ACS_API_BASE={base}/v1
export ACS_API_KEY={key}"""
FIRST_CURL = """curl "$ACS_API_BASE/models" -H "Authorization: Bearer $ACS_API_KEY\""""


def posted_from[**P](
    page: str,
) -> Callable[
    [Callable[Concatenate[HttpRequest, P], HttpResponse]], Callable[Concatenate[HttpRequest, P], HttpResponse]
]:
    """A view that a form on the page of this name posts to, for signed-in Users.

    Whoever comes otherwise is shown that page: by a reload, or back from signing in where the session had ended.
    """

    def decorate(
        view: Callable[Concatenate[HttpRequest, P], HttpResponse],
    ) -> Callable[Concatenate[HttpRequest, P], HttpResponse]:
        @functools.wraps(view)
        def guarded(request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
            if not request.user.is_authenticated:
                return redirect_to_login(reverse(page))
            return view(request, *args, **kwargs) if request.method == "POST" else redirect(page)

        return guarded

    return decorate


@login_required
@never_cache
@require_http_methods(["GET", "POST"])
@sensitive_variables("text")
def new_key(request: HttpRequest) -> HttpResponse:
    """Ask for a new key's name, cap and end; make it, and show its text this once."""
    user = signed_in(request)
    form = KeyForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        if keys_of(user).filter(revoked_at=None).count() >= KEYS_AT_MOST:
            form.add_error(None, f"You have {KEYS_AT_MOST} keys; revoke one that you do not use any more.")
        else:
            key, text = services.create_key(
                user=user,
                name=form.cleaned_data["name"],
                token_cap=form.cleaned_data["token_cap"],
                expires_at=form.expires_at(),
            )
            setup = SETUP.format(base=base_url(request), key=text)
            shown = {"key": key, "text": text, "setup": setup, "curl": FIRST_CURL}
            return render(request, "accounts/key_made.html", shown)
    return render(request, "accounts/key_form.html", {"form": form, "key": None})


@login_required
@never_cache
@require_http_methods(["GET", "POST"])
def key_page(request: HttpRequest, key_id: int) -> HttpResponse:
    """One key: its name, cap and end, to be changed while it is not revoked."""
    key = _key(request, key_id)
    form = KeyForm(request.POST or None, initial=initial_of(key))
    if request.method == "POST" and key.revoked_at is None and form.is_valid():
        keeps_end = "last_day" not in form.changed_data
        services.update_key(
            key=key,
            name=form.cleaned_data["name"],
            token_cap=form.cleaned_data["token_cap"],
            expires_at=key.expires_at if keeps_end else form.expires_at(),
        )
        messages.success(request, f"The key “{key.name}” was changed.")
        return redirect("keys")
    return render(request, "accounts/key_form.html", {"form": form, "key": key})


@posted_from("keys")
def pause_key(request: HttpRequest, key_id: int) -> HttpResponse:
    """Refuse the key until it is resumed."""
    key = _key(request, key_id)
    services.pause_key(key=key)
    messages.success(request, f"The key “{key.name}” is paused: requests with it are refused.")
    return redirect("keys")


@posted_from("keys")
def resume_key(request: HttpRequest, key_id: int) -> HttpResponse:
    """Take a paused key again."""
    key = _key(request, key_id)
    services.resume_key(key=key)
    if key.is_working:
        messages.success(request, f"The key “{key.name}” works again.")
    return redirect("keys")


@login_required
@require_http_methods(["GET", "POST"])
def revoke_key(request: HttpRequest, key_id: int) -> HttpResponse:
    """Ask, then refuse the key for ever."""
    key = _key(request, key_id)
    if request.method == "POST":
        services.revoke_key(key=key)
        messages.success(request, f"The key “{key.name}” is revoked for ever.")
        return redirect("keys")
    question: dict[str, Any] = {
        "title": f"Revoke the key “{key.name}”?",
        "text": f"Requests with {key.prefix}… are refused from then on, for ever. Jobs that were submitted go on.",
        "action": "Revoke for ever",
        "back": "keys",
    }
    return render(request, "confirm.html", question)


def signed_in(request: HttpRequest) -> User:
    """The User who is signed in; for views that `login_required` guards."""
    assert isinstance(request.user, User)
    return request.user


def _key(request: HttpRequest, key_id: int) -> ApiKey:
    """The User's own key, or 404."""
    return get_object_or_404(keys_of(signed_in(request)), pk=key_id)
