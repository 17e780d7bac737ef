"""The browsers that a User is signed in with: noted at sign-in, ended from the account page."""

from typing import Any

from django.contrib.auth.signals import user_logged_in
from django.contrib.sessions.models import Session
from django.db import transaction
from django.http import HttpRequest
from django.utils import timezone

from accounts.models import SignIn, User


def note_sign_in(*, request: HttpRequest, user: User) -> None:
    """Note that the request's session is of `user` now."""
    session: Any = request.session
    if session.session_key is None:
        session.create()
    else:
        session.save()
    SignIn.objects.update_or_create(
        pk=session.session_key,
        defaults={
            "user": user,
            "address": request.META.get("REMOTE_ADDR") or None,
            "agent": request.headers.get("User-Agent", "")[:300].replace("\0", ""),
        },
    )


def sign_ins_of(user: User) -> list[SignIn]:
    """The User's sessions that have not expired, newest first."""
    return list(SignIn.objects.filter(user=user, session__expire_date__gt=timezone.now()))


@transaction.atomic
def end_sign_ins(*, user: User, only: str | None = None, but: str | None = None) -> int:
    """End the User's sessions: the one that begins with `only`, or all but the one with the key `but`."""
    ending = SignIn.objects.filter(user=user)
    if only is not None:
        ending = ending.filter(session__session_key__startswith=only)
    if but is not None:
        ending = ending.exclude(pk=but)
    keys = list(ending.values_list("pk", flat=True))
    Session.objects.filter(pk__in=keys).delete()
    return len(keys)


def connect() -> None:
    """Note each sign-in from now on, by whichever page."""
    user_logged_in.connect(_on_sign_in, dispatch_uid="accounts.note_sign_in")


def _on_sign_in(sender: Any, request: HttpRequest | None, user: Any, **kwargs: Any) -> None:
    # Django's test client signs in with a request that has a session and nothing else.
    if request is not None and hasattr(request, "session") and isinstance(user, User):
        note_sign_in(request=request, user=user)
