"""What the installation remembers about itself."""

from django.db import models


class StorageFolder(models.Model):
    """The storage folder that the API wrote to first, by the marker file in it.

    Another host may have a folder of the same name that nobody shares: a worker there must not write to it.
    """

    url = models.CharField(max_length=1000, unique=True)
    marker = models.CharField(max_length=36)
    host = models.CharField(max_length=255, help_text="Where the API ran that recorded it.")
    recorded_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"storage folder recorded by {self.host}"
