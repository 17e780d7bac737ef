"""How accounts begin: by an invitation, or by asking for one that an operator approves."""

import hashlib
import secrets
from datetime import timedelta

import structlog
from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.mail import send_mail
from django.db import transaction
from django.template.loader import render_to_string
from django.utils import timezone

from accounts.models import Invitation, User

logger = structlog.get_logger(__name__)

DAYS = 7


def create_invitation(*, made_by: User | None, email: str = "", days: float = DAYS) -> tuple[Invitation, str]:
    """A new invitation and its token, which nothing can show again. Raises ValidationError."""
    token = secrets.token_urlsafe(32)
    invitation = Invitation(
        digest=_digest(token), email=email, made_by=made_by, expires_at=timezone.now() + timedelta(days=days)
    )
    invitation.full_clean()
    invitation.save()
    return invitation, token


def invitation_path(token: str) -> str:
    """Where its page is."""
    return f"/app/invitation/{token}"


def find_invitation(token: str) -> Invitation | None:
    """The invitation with this token that is open still."""
    invitation = Invitation.objects.filter(digest=_digest(token)).first()
    return invitation if invitation is not None and invitation.is_open else None


@transaction.atomic
def accept_invitation(*, token: str, username: str, email: str, password: str) -> User:
    """Make the account that the invitation is for, once. Raises ValidationError, also where it is over or used."""
    invitation = Invitation.objects.select_for_update(of=("self",)).filter(digest=_digest(token)).first()
    if invitation is None or not invitation.is_open:
        raise ValidationError("This invitation is over, or was used already.")
    if invitation.email and invitation.email.lower() != email.lower():
        raise ValidationError({"email": f"This invitation is for {invitation.email}."})
    user = _make_user(username, email, password)
    invitation.used_at, invitation.user = timezone.now(), user
    invitation.save(update_fields=["used_at", "user"])
    return user


def ask_for_account(*, username: str, email: str, password: str, operators_url: str = "") -> User:
    """Make an account that an operator has to approve before it can be used, and tell the operators by mail.

    `operators_url` is where they approve it: the admin's page of those who wait. Raises ValidationError.
    """
    with transaction.atomic():
        user = _make_user(username, email, password)
        user.is_active, user.awaits_approval = False, True
        user.save(update_fields=["is_active", "awaits_approval"])
    # After the commit: a slow mail server keeps no transaction open, and one that is away undoes nothing.
    text = render_to_string("accounts/mail/asked.txt", {"user": user, "operators_url": operators_url})
    _send("Somebody asks for an account", text, to=operator_addresses(), about=user)
    return user


def operator_addresses() -> list[str]:
    """Who hears of those that wait for approval: the setting OPERATOR_EMAILS, else every active superuser."""
    if settings.OPERATOR_EMAILS:
        return list(settings.OPERATOR_EMAILS)
    return list(User.objects.filter(is_superuser=True, is_active=True).order_by("pk").values_list("email", flat=True))


def approve_user(*, user: User, sign_in_url: str) -> bool:
    """Let a User in who waits for it, and tell them by mail; False where they do not wait."""
    waiting = User.objects.filter(pk=user.pk, awaits_approval=True)
    if not waiting.update(awaits_approval=False, is_active=True):
        return False
    user.refresh_from_db()
    text = render_to_string("accounts/mail/approved.txt", {"user": user, "sign_in_url": sign_in_url})
    _send("Your account is ready", text, to=[user.email], about=user)
    return True


def _send(subject: str, text: str, *, to: list[str], about: User) -> None:
    try:
        send_mail(subject, text, None, to)
    except OSError as error:  # SMTP's are OSErrors too
        logger.warning("a mail was not sent", subject=subject, user_id=about.pk, error_type=type(error).__name__)


def _make_user(username: str, email: str, password: str) -> User:
    user = User(username=username, email=email)
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise ValidationError({"password": error.messages}) from None
    user.set_password(password)
    user.full_clean(exclude=["password"])
    user.save()
    return user


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
