"""The routes of Jobs."""

from django.urls import path

from jobs.views import JobCancelView, JobResultView, JobsView, JobView

urlpatterns = [
    path("v1/completion-jobs", JobsView.as_view()),
    path("v1/completion-jobs/<any_uuid:job_id>", JobView.as_view()),
    path("v1/completion-jobs/<any_uuid:job_id>/cancel", JobCancelView.as_view()),
    path("v1/completion-jobs/<any_uuid:job_id>/result", JobResultView.as_view()),
]
