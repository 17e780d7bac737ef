"""Users and API keys."""

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """Users and API keys."""

    name = "accounts"

    def ready(self) -> None:
        """Let drf-spectacular know of our keys."""
        from accounts import schema  # noqa: F401
