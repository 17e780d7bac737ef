"""Users and API keys."""

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """Users and API keys."""

    name = "accounts"
