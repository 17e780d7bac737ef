"""The routes of Harvest jobs."""

from django.urls import path

from harvest.views import HarvestCancelView, HarvestsView, HarvestView

urlpatterns = [
    path("v1/harvest", HarvestsView.as_view()),
    path("v1/harvest/<any_uuid:job_id>", HarvestView.as_view()),
    path("v1/harvest/<any_uuid:job_id>/cancel", HarvestCancelView.as_view()),
]
