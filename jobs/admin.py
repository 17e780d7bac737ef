"""Jobs in the admin: to read, and to cancel."""

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from jobs.models import CompletionJob
from jobs.services import cancel_job


@admin.register(CompletionJob)
class CompletionJobAdmin(admin.ModelAdmin[CompletionJob]):
    """Rows that the API and the workers write; an operator only ends them."""

    list_display = ("id", "user", "model", "status", "hold_tokens", "charged_tokens", "created_at", "finished_at")
    list_filter = ("status", "base_model")
    list_select_related = ("user",)
    search_fields = ("id", "user__username", "user__email")
    show_full_result_count = False
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

    @admin.action(description="Cancel", permissions=["change"])
    def cancel(self, request: HttpRequest, queryset: QuerySet[CompletionJob]) -> None:
        """Cancel the chosen Jobs that have not ended; their workers stop within a second."""
        ids = list(queryset.filter(finished_at__isnull=True).values_list("pk", flat=True))
        for job_id in ids:
            cancel_job(job_id=job_id)
        messages.success(request, f"{len(ids)} cancelled.")

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never: Jobs are submitted."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: CompletionJob | None = None) -> bool:
        """For the actions alone: a Job's own page is read-only."""
        return obj is None and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: CompletionJob | None = None) -> bool:
        """Of ended Jobs, whose files go too; deleting a User asks this for each of their Jobs."""
        return (obj is None or obj.is_ended) and super().has_delete_permission(request, obj)

    def get_actions(self, request: HttpRequest) -> dict[str, object]:  # type: ignore[override]
        """Without Django's own deletion of rows, which asks nothing about unfinished ones."""
        actions = super().get_actions(request)
        actions.pop("delete_selected", None)
        return dict(actions)
