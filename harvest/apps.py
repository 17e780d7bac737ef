"""Harvest jobs."""

from django.apps import AppConfig


class HarvestConfig(AppConfig):
    """Harvest jobs."""

    name = "harvest"

    def ready(self) -> None:
        """Files go with their job, also when a User is deleted."""
        from django.db.models.signals import post_delete

        from harvest.models import HarvestJob
        from harvest.services import let_go_of_files

        def forget(sender: type[HarvestJob], instance: HarvestJob, **_: object) -> None:
            let_go_of_files(instance)

        post_delete.connect(forget, sender=HarvestJob, weak=False, dispatch_uid="harvest.files")
