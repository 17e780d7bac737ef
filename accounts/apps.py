"""Users and API keys."""

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """Users and API keys."""

    name = "accounts"

    def ready(self) -> None:
        """Let drf-spectacular know of our keys, and note each sign-in."""
        from accounts import schema, sign_ins  # noqa: F401

        sign_ins.connect()
