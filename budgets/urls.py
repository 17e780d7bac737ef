"""The routes of the money: the API's, and the pages of keys and usage."""

from django.urls import path

from budgets import pages
from budgets.views import BudgetView

urlpatterns = [
    path("v1/budget", BudgetView.as_view()),
    path("app/keys", pages.keys_page, name="keys"),
    path("app/usage", pages.usage_page, name="usage"),
    path("app/usage.csv", pages.usage_csv, name="usage-csv"),
]
