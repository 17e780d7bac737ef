"""Users and API keys."""

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """Users and API keys."""

    name = "accounts"

    def ready(self) -> None:
        """Let drf-spectacular know of our keys, note each sign-in, and hear of changes of keys."""
        from accounts import recent_keys, schema, sign_ins  # noqa: F401

        sign_ins.connect()
        recent_keys.connect()
