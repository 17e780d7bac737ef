"""Budgets, Holds and the ledger."""

from django.apps import AppConfig


class BudgetsConfig(AppConfig):
    """Budgets, Holds and the ledger."""

    name = "budgets"
