"""Completion Jobs."""

from typing import TYPE_CHECKING

from django.apps import AppConfig

if TYPE_CHECKING:
    from inference.worker.background import BackgroundWork, LentEngine


class JobsConfig(AppConfig):
    """Completion Jobs."""

    name = "jobs"

    def ready(self) -> None:
        """Inference workers run Jobs beside their Completions; files go with their Job, also when a User is deleted."""
        from django.db.models.signals import post_delete

        from inference.worker.background import register_background
        from jobs.models import CompletionJob
        from jobs.services import jobs_queue, let_go_of_files

        def forget(sender: type[CompletionJob], instance: CompletionJob, **_: object) -> None:
            if instance.has_files:
                let_go_of_files(instance)

        post_delete.connect(forget, sender=CompletionJob, weak=False, dispatch_uid="jobs.files")
        register_background(queue=jobs_queue, begin=_begin)


def _begin(engine: "LentEngine") -> "BackgroundWork":
    from jobs.worker import JobRunner

    return JobRunner(engine)
