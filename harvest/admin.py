"""Harvest jobs in the admin: to read, cancel, run again, and delete the files of."""

from django.contrib import admin
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat

from acsinfra.core.admin import MadeFilter, SearchedByIdAndUser, operator_action
from acsinfra.core.admin_columns import id_column, number_column, number_columns
from harvest.models import HarvestJob
from harvest.services import cancel_harvest, delete_files
from harvest.services import run_again as run_harvest_again

_NUMBERS = number_columns("n_prompts", "reserved_tokens", "tokens", "bytes_at_most", "bytes_written")


@admin.register(HarvestJob)
class HarvestJobAdmin(SearchedByIdAndUser[HarvestJob]):
    """Rows that the API and the runners write; an operator only ends them and frees their storage."""

    list_display = (
        id_column(),
        "user",
        "model",
        "status",
        number_column("n_prompts", "prompts"),
        number_column("tokens"),
        "size",
        "created_at",
        "kept",
    )
    list_filter = (MadeFilter, "status", "base_model")
    list_select_related = ("user",)
    ordering = ("-id",)
    actions = ("cancel", "run_again", "delete_their_files")
    readonly_fields = _NUMBERS
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
        *_NUMBERS,
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

    @admin.display(description="written")
    def size(self, job: HarvestJob) -> str:
        """What its files take."""
        return filesizeformat(job.bytes_written)

    @admin.display(boolean=True, description="files")
    def kept(self, job: HarvestJob) -> bool:
        """Whether its files are there."""
        return job.status == HarvestJob.Status.DONE and job.files_deleted_at is None

    @operator_action(
        "Cancel the Harvest jobs",
        question="Cancel these Harvest jobs? One whose run has started is charged its reserved tokens.",
    )
    def cancel(self, request: HttpRequest, job: HarvestJob) -> str | None:
        """Cancel a job that has not ended."""
        if job.is_ended:
            return None
        return "Cancelled." if cancel_harvest(job_id=job.pk).status == HarvestJob.Status.CANCELLED else None

    @operator_action(
        "Run again",
        question="Run these Harvest jobs again? Each becomes a new job of its User and key, held and charged anew.",
    )
    def run_again(self, request: HttpRequest, job: HarvestJob) -> str | None:
        """Put an ended job's corpus in line once more."""
        return f"Run again, as Harvest job {run_harvest_again(job_id=job.pk).pk}."

    @operator_action(
        "Delete files and prompts",
        question="Delete the files and the prompts of these Harvest jobs for good? The rows stay.",
        permission="delete",
    )
    def delete_their_files(self, request: HttpRequest, job: HarvestJob) -> str | None:
        """Delete the files and prompts of a job that has ended."""
        if job.files_deleted_at is not None:
            return None
        delete_files(job_id=job.pk)
        return "Files and prompts deleted."

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never: jobs are submitted."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: HarvestJob | None = None) -> bool:
        """For the actions alone: a job's own page is read-only."""
        return obj is None and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: HarvestJob | None = None) -> bool:
        """Of ended jobs, whose files go too; deleting a User asks this for each of their jobs."""
        return (obj is None or obj.is_ended) and super().has_delete_permission(request, obj)
