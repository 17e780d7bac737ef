"""Budgets, Holds and the ledger."""

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_save


class BudgetsConfig(AppConfig):
    """Budgets, Holds and the ledger."""

    name = "budgets"

    def ready(self) -> None:
        """Follow the caps of keys, which accounts keeps and may not tell us of."""
        post_save.connect(_follow_cap, sender="accounts.ApiKey", dispatch_uid="budgets.follow_cap")


def _follow_cap(
    *, instance: Any, created: bool, raw: bool, update_fields: frozenset[str] | None, **kwargs: Any
) -> None:
    from budgets.limits import apply_key_cap

    if not created and not raw and (update_fields is None or "token_cap" in update_fields):
        apply_key_cap(api_key_id=instance.pk)
