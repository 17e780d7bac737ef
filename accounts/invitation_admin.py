"""Invitations in the admin: the link of a new one is shown once, in the message after saving."""

from datetime import timedelta
from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest
from django.utils import timezone

from accounts.invitations import DAYS, create_invitation, invitation_path
from accounts.models import Invitation, User
from acsinfra.core.admin import PlatformAdmin
from acsinfra.core.file_links import base_url


@admin.register(Invitation)
class InvitationAdmin(PlatformAdmin[Invitation]):
    """Links that each make one account."""

    list_display = ("created_at", "email", "made_by", "expires_at", "used_at", "user")
    list_select_related = ("made_by", "user")
    search_fields = ("email", "user__username", "made_by__username")
    search_help_text = "An address, or the name of whom it is from or who used it."
    readonly_fields = ("made_by", "created_at", "used_at", "user")

    def get_fields(self, request: HttpRequest, obj: Invitation | None = None) -> tuple[str, ...]:
        """A new one has only what is asked for."""
        return ("email", "expires_at", *(self.readonly_fields if obj else ()))

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        """A week."""
        return {"expires_at": timezone.now() + timedelta(days=DAYS)}

    def has_change_permission(self, request: HttpRequest, obj: Invitation | None = None) -> bool:
        """Never: it is deleted, and another made."""
        return False

    def save_model(self, request: HttpRequest, obj: Invitation, form: Any, change: bool) -> None:
        """Make it and show its link."""
        days = (obj.expires_at - timezone.now()) / timedelta(days=1)
        user = request.user if isinstance(request.user, User) else None
        invitation, token = create_invitation(made_by=user, email=obj.email, days=days)
        # The admin goes on with the object that it made: it becomes the saved invitation.
        obj.__dict__.update(invitation.__dict__)
        link = f"{base_url(request)}{invitation_path(token)}"
        self.message_user(request, f"The link, shown this once: {link}", messages.WARNING)
