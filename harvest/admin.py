"""Harvest jobs in the admin: to read, to cancel, and to delete the files of."""

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from harvest.models import HarvestJob
from harvest.services import cancel_harvest, delete_files


@admin.register(HarvestJob)
class HarvestJobAdmin(admin.ModelAdmin[HarvestJob]):
    """Rows that the API and the runners write; an operator only ends them and frees their storage."""

    list_display = ("id", "user", "model", "status", "n_prompts", "tokens", "bytes_written", "created_at", "kept")
    list_filter = ("status", "base_model")
    list_select_related = ("user",)
    search_fields = ("id", "run_id", "user__username", "user__email")
    date_hierarchy = "created_at"
    show_full_result_count = False
    actions = ("cancel", "delete_their_files")
    fields = (
        "id",
        "run_id",
        "user",
        "api_key",
        "model",
        "status",
        "error",
        "layers",
        "shard_size",
        "add_special_tokens",
        "contents",
        "n_prompts",
        "reserved_tokens",
        "tokens",
        "bytes_at_most",
        "bytes_written",
        "claims",
        "tries",
        "setbacks",
        "created_at",
        "started_at",
        "completed_at",
        "lease_expires_at",
        "files_deleted_at",
        "result",
    )

    @admin.display(boolean=True, description="files")
    def kept(self, job: HarvestJob) -> bool:
        """Whether its files are there."""
        return job.status == HarvestJob.Status.DONE and job.files_deleted_at is None

    @admin.action(description="Cancel", permissions=["change"])
    def cancel(self, request: HttpRequest, queryset: QuerySet[HarvestJob]) -> None:
        """Cancel the chosen jobs that have not ended."""
        ids = list(queryset.filter(completed_at__isnull=True).values_list("pk", flat=True))
        for job_id in ids:
            cancel_harvest(job_id=job_id)
        messages.success(request, f"{len(ids)} cancelled.")

    @admin.action(description="Delete their files and prompts", permissions=["delete"])
    def delete_their_files(self, request: HttpRequest, queryset: QuerySet[HarvestJob]) -> None:
        """Delete the files and prompts of the chosen jobs that have ended."""
        ids = list(queryset.filter(completed_at__isnull=False).values_list("pk", flat=True))
        for job_id in ids:
            delete_files(job_id=job_id)
        messages.success(request, f"The files of {len(ids)} jobs are being deleted.")

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never: jobs are submitted."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: HarvestJob | None = None) -> bool:
        """For the actions alone: a job's own page is read-only."""
        return obj is None and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: HarvestJob | None = None) -> bool:
        """Of ended jobs, whose files go too; deleting a User asks this for each of their jobs."""
        return (obj is None or obj.is_ended) and super().has_delete_permission(request, obj)

    def get_actions(self, request: HttpRequest) -> dict[str, object]:  # type: ignore[override]
        """Without Django's own deletion of rows, which asks nothing about unfinished ones."""
        actions = super().get_actions(request)
        actions.pop("delete_selected", None)
        return dict(actions)
