"""The routes of Jobs, and the pages of both kinds of job."""

from django.contrib import admin
from django.urls import path

from jobs import pages
from jobs.dashboard import dashboard
from jobs.metrics import metrics
from jobs.views import JobCancelView, JobResultView, JobsView, JobView

urlpatterns = [
    path("metrics", metrics),
    path("admin/dashboard/", admin.site.admin_view(dashboard), name="dashboard"),
    path("v1/completion-jobs", JobsView.as_view()),
    path("v1/completion-jobs/<any_uuid:job_id>", JobView.as_view()),
    path("v1/completion-jobs/<any_uuid:job_id>/cancel", JobCancelView.as_view()),
    path("v1/completion-jobs/<any_uuid:job_id>/result", JobResultView.as_view()),
    path("app", pages.home_page, name="app"),
    path("app/jobs", pages.jobs_page, name="jobs"),
    path("app/jobs/shell", pages.shell_page, name="job-shell"),
    path("app/jobs/<uuid:job_id>", pages.job_page, name="job"),
    path("app/jobs/<uuid:job_id>/result", pages.job_result_part, name="job-result"),
    path("app/jobs/<uuid:job_id>/download", pages.download_result, name="job-download"),
    path("app/jobs/<uuid:job_id>/cancel", pages.cancel_job_now, name="cancel-job"),
    path("app/jobs/<uuid:job_id>/delete", pages.delete_job_result, name="delete-job-result"),
    path("app/jobs/harvest/<uuid:job_id>", pages.harvest_page, name="harvest-job"),
    path("app/jobs/harvest/<uuid:job_id>/statistics", pages.harvest_statistics_part, name="harvest-statistics"),
    path("app/jobs/harvest/<uuid:job_id>/cancel", pages.cancel_harvest, name="cancel-harvest"),
    path("app/jobs/harvest/<uuid:job_id>/delete", pages.delete_harvest_files, name="delete-harvest-files"),
]
