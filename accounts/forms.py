"""The forms of the account and keys pages."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from django import forms
from django.contrib.auth.forms import AuthenticationForm, PasswordResetForm
from django.utils import timezone

from accounts.models import ApiKey, User
from accounts.services import INT64_MAX


class SignInForm(AuthenticationForm):
    """Name and password, with what is said of them in the words of the page."""

    error_messages: dict[str, Any] = {
        **AuthenticationForm.error_messages,
        "invalid_login": "This name and password do not go together. Capitals count in both.",
    }


class KeyForm(forms.Form):
    """A key's name, cap and last day."""

    name = forms.CharField(max_length=100, help_text="To know it by, such as the script or the machine that uses it.")
    token_cap = forms.IntegerField(
        label="Tokens a month",
        required=False,
        min_value=0,
        max_value=INT64_MAX,
        help_text="The most that this key may spend. Empty: as much as your Budget has.",
    )
    last_day = forms.DateField(
        required=False,
        widget=forms.DateInput(attrs={"type": "date"}),
        help_text="It works until the end of this day (UTC). Empty: until you revoke it.",
    )

    def clean_name(self) -> str:
        """Refuse what no list could show."""
        name: str = self.cleaned_data["name"]
        if not name.isprintable():
            raise forms.ValidationError("Use printable characters only.")
        return name

    def clean_last_day(self) -> date | None:
        """A day that is still to come, or today."""
        day: date | None = self.cleaned_data["last_day"]
        if day is not None and "last_day" in self.changed_data:
            if day < timezone.now().date():
                raise forms.ValidationError("This day is over.")
            if day.year > 9000:
                raise forms.ValidationError("This day is too far away.")
        return day

    def expires_at(self) -> datetime | None:
        """The moment at which the last day ends."""
        day: date | None = self.cleaned_data["last_day"]
        return None if day is None else datetime.combine(day + timedelta(days=1), time(), tzinfo=UTC)


def initial_of(key: ApiKey) -> dict[str, Any]:
    """What `KeyForm` begins with for a key that is there."""
    end = key.expires_at
    last_day = None if end is None else (end - timedelta(microseconds=1)).astimezone(UTC).date()
    return {"name": key.name, "token_cap": key.token_cap, "last_day": last_day}


class AccountForm(forms.Form):
    """What a new account needs."""

    username = forms.CharField(
        label="Name",
        max_length=150,
        help_text="To sign in with: letters, digits and @ . + - _",
        widget=forms.TextInput(attrs={"autocomplete": "username", "autocapitalize": "none"}),
    )
    email = forms.EmailField(max_length=254, widget=forms.EmailInput(attrs={"autocomplete": "email"}))
    password = forms.CharField(
        strip=False,
        max_length=1024,
        help_text="At least 12 characters.",
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
    )


class ResetForm(PasswordResetForm):
    """Asks for a link that sets a password; also a User who never had one gets it."""

    def get_users(self, email: str) -> Iterator[User]:
        """The active User of the address."""
        return User.objects.filter(email__iexact=email, is_active=True).iterator()
