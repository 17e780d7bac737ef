"""Jobs in the admin: to read, cancel, run again, and erase what they hold."""

from django.contrib import admin
from django.http import HttpRequest

from acsinfra.core.admin import MadeFilter, SearchedByIdAndUser, operator_action
from acsinfra.core.admin_columns import id_column, number_column, number_columns
from jobs.models import CompletionJob, JobResult
from jobs.result_views import read_result
from jobs.services import cancel_job, erase_result
from jobs.submitting import run_again as run_job_again

_NUMBERS = number_columns("hold_tokens", "counted_tokens", "charged_tokens")


@admin.register(CompletionJob)
class CompletionJobAdmin(SearchedByIdAndUser[CompletionJob]):
    """Rows that the API and the workers write; an operator ends them, runs them again, and erases what they hold."""

    list_display = (
        id_column(),
        "user",
        "model",
        "status",
        number_column("hold_tokens", "held"),
        number_column("charged_tokens", "charged"),
        "created_at",
        "finished_at",
    )
    list_filter = (MadeFilter, "status")
    list_select_related = ("user",)
    ordering = ("-id",)
    actions = ("cancel", "run_again", "erase")
    readonly_fields = ("failure", *_NUMBERS)
    fields = (
        "id",
        "request_id",
        "user",
        "api_key",
        "model",
        "status",
        "failure",
        "hold_id",
        *_NUMBERS,
        "claims",
        "tries",
        "created_at",
        "started_at",
        "cancel_requested_at",
        "finished_at",
        "expires_at",
        "is_erased",
        "lease_expires_at",
    )

    @admin.display(description="failure")
    def failure(self, job: CompletionJob) -> str:
        """The code and the message of a Job that failed."""
        row = JobResult.objects.filter(job=job).first() if job.status == CompletionJob.Status.FAILED else None
        if row is None:
            return "-"
        result = read_result(row)
        return f"{row.status} {result.error_code}: {result.error_message}" if result.error_code else "-"

    @operator_action(
        "Cancel the Jobs", question="Cancel these Jobs? What one that runs has generated until now is charged."
    )
    def cancel(self, request: HttpRequest, job: CompletionJob) -> str | None:
        """Cancel a Job that has not ended; its worker stops within a second."""
        if job.is_ended:
            return None
        return "Cancelled." if cancel_job(job_id=job.pk).status == CompletionJob.Status.CANCELLED else None

    @operator_action(
        "Run again", question="Run these Jobs again? Each becomes a new Job of its User and key, held and charged anew."
    )
    def run_again(self, request: HttpRequest, job: CompletionJob) -> str | None:
        """Put an ended Job's request in line once more."""
        return f"Run again, as Completion Job {run_job_again(job_id=job.pk).pk}."

    @operator_action(
        "Erase request and result",
        question="Erase what these Jobs asked for and answered, with their files, for good? The rows stay.",
        permission="delete",
    )
    def erase(self, request: HttpRequest, job: CompletionJob) -> str | None:
        """Erase the request and the result of a Job that has ended."""
        if job.is_erased:
            return None
        erase_result(job_id=job.pk)
        return "Request and result erased."

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never: Jobs are submitted."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: CompletionJob | None = None) -> bool:
        """For the actions alone: a Job's own page is read-only."""
        return obj is None and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: CompletionJob | None = None) -> bool:
        """Of ended Jobs, whose files go too; deleting a User asks this for each of their Jobs."""
        return (obj is None or obj.is_ended) and super().has_delete_permission(request, obj)
