"""The project's routes and GET /v1/budget, which joins them once Completions and Harvest jobs take Holds."""

from django.urls import path

from acsinfra.urls import urlpatterns as project_urlpatterns
from budgets.views import BudgetView

urlpatterns = [path("v1/budget", BudgetView.as_view()), *project_urlpatterns]
