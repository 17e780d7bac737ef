"""What keeps a Harvest job from being taken: how many a key may have, and what its User's storage may hold.

To be asked inside the transaction that takes the job, under `lock_payers`: of two submits at once one sees the other.
"""

from typing import Any, Final

from django.db.models import Q, Sum
from django.db.models.functions import Coalesce
from django.utils import timezone

from accounts.models import ApiKey, User
from accounts.selectors import limit as limit_of
from acsinfra.core.errors import ApiError, ErrorCode, invalid_api_key
from harvest.models import HarvestJob

UNFINISHED: Final = Q(status__in=[HarvestJob.Status.PENDING, HarvestJob.Status.RUNNING])


def lock_payers(user: User, api_key: ApiKey | None) -> User:
    """The User as they are now, locked, and the key locked too. Raises `401` where one is gone."""
    owner = User.objects.select_for_update(no_key=True, of=("self",)).filter(pk=user.pk).first()
    keys = ApiKey.objects.select_for_update(no_key=True, of=("self",))
    if owner is None or (api_key is not None and keys.filter(pk=api_key.pk).first() is None):
        raise invalid_api_key()
    return owner


def _jobs_of(user: User, api_key: ApiKey | None) -> Any:
    """The key's jobs; those from the App have none, and count by their User."""
    return HarvestJob.objects.filter(user=user, api_key=api_key)


def require_place(user: User, api_key: ApiKey | None) -> None:
    """Raise `429 harvest_concurrency_exceeded` for a key that has as many unfinished jobs as it may."""
    limit = limit_of(user, "harvests_unfinished")
    if limit is not None and _jobs_of(user, api_key).filter(UNFINISHED).count() >= limit:
        raise ApiError(
            ErrorCode.HARVEST_CONCURRENCY_EXCEEDED,
            f"This API key has {limit} unfinished Harvest job{'' if limit == 1 else 's'}, as many as it may. "
            "Wait for one to end, or cancel it.",
            headers={"Retry-After": "30"},
        )


def require_monthly_count(user: User, api_key: ApiKey | None) -> None:
    """Raise `429 harvest_quota_exceeded` for a key that has submitted all its jobs of this month."""
    limit = limit_of(user, "harvests_per_month")
    if limit is None:
        return
    month = timezone.now().replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    if _jobs_of(user, api_key).filter(created_at__gte=month).count() >= limit:
        raise ApiError(
            ErrorCode.HARVEST_QUOTA_EXCEEDED,
            f"This API key has submitted its {limit} Harvest jobs of this month; a new month begins a new count.",
            headers={"x-should-retry": "false"},
        )


def require_storage(user: User, bytes_at_most: int) -> None:
    """Raise `400 corpus_too_large` where the User's storage has no room for what a job may write."""
    quota = limit_of(user, "storage_quota_bytes")
    if quota is None:
        return
    jobs = HarvestJob.objects.filter(user=user)
    kept = jobs.filter(status=HarvestJob.Status.DONE, files_deleted_at__isnull=True).aggregate(
        sum=Coalesce(Sum("bytes_written"), 0)
    )["sum"]
    to_come = jobs.filter(UNFINISHED).aggregate(sum=Coalesce(Sum("bytes_at_most"), 0))["sum"]
    left = max(0, quota - kept - to_come)
    if bytes_at_most > left:
        raise ApiError(
            ErrorCode.CORPUS_TOO_LARGE,
            f"This job may write up to {bytes_at_most:,} bytes; your storage has room for {left:,} more. "
            "Delete files of ended jobs, or send fewer prompts or layers.",
            param="prompts",
        )
