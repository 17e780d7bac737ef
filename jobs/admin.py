"""Jobs in the admin: to read, and to cancel."""

from django.contrib import admin
from django.http import HttpRequest

from acsinfra.core.admin import MadeFilter, SearchedByIdAndUser, operator_action
from jobs.models import CompletionJob
from jobs.services import cancel_job


@admin.register(CompletionJob)
class CompletionJobAdmin(SearchedByIdAndUser[CompletionJob]):
    """Rows that the API and the workers write; an operator only ends them."""

    list_display = ("id", "user", "model", "status", "hold_tokens", "charged_tokens", "created_at", "finished_at")
    list_filter = (MadeFilter, "status", "base_model")
    list_select_related = ("user",)
    ordering = ("-id",)
    actions = ("cancel",)
    fields = (
        "id",
        "request_id",
        "user",
        "api_key",
        "model",
        "status",
        "hold_tokens",
        "hold_id",
        "counted_tokens",
        "charged_tokens",
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

    @operator_action("Cancel", question="Cancel these Jobs? What one that runs has generated until now is charged.")
    def cancel(self, request: HttpRequest, job: CompletionJob) -> str | None:
        """Cancel a Job that has not ended; its worker stops within a second."""
        if job.is_ended:
            return None
        return "Cancelled." if cancel_job(job_id=job.pk).status == CompletionJob.Status.CANCELLED else None

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never: Jobs are submitted."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: CompletionJob | None = None) -> bool:
        """For the actions alone: a Job's own page is read-only."""
        return obj is None and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: CompletionJob | None = None) -> bool:
        """Of ended Jobs, whose files go too; deleting a User asks this for each of their Jobs."""
        return (obj is None or obj.is_ended) and super().has_delete_permission(request, obj)
