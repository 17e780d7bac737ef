"""Users and API keys."""

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.db.models.functions import Lower
from django.utils import timezone


class User(AbstractUser):
    """A person who signs in and owns keys, jobs and a Budget.

    The nullable limits override the settings of the same name for this User; null means the setting.
    """

    email = models.EmailField(unique=True)
    requests_at_once = models.PositiveIntegerField(null=True, blank=True, help_text="Requests of one key at once.")
    requests_queued = models.PositiveIntegerField(null=True, blank=True, help_text="Requests of one key that wait.")
    requests_per_minute = models.PositiveIntegerField(null=True, blank=True, help_text="Requests a minute of one key.")
    jobs_unfinished = models.PositiveIntegerField(null=True, blank=True, help_text="Unfinished Jobs of the User.")
    jobs_running = models.PositiveIntegerField(null=True, blank=True, help_text="Jobs of the User that run at once.")
    harvests_unfinished = models.PositiveIntegerField(
        null=True, blank=True, help_text="Unfinished Harvest jobs of one key."
    )
    harvests_per_month = models.PositiveIntegerField(null=True, blank=True, help_text="Harvest jobs of a month.")
    harvest_waits_at_once = models.PositiveIntegerField(
        null=True, blank=True, help_text="Requests of one key that wait for a Harvest job at once."
    )
    storage_quota_bytes = models.PositiveBigIntegerField(
        null=True, blank=True, help_text="Bytes of kept harvest files."
    )

    REQUIRED_FIELDS = ["email"]

    class Meta:
        constraints = [models.UniqueConstraint(Lower("email"), name="accounts_user_email_unique")]


class ApiKey(models.Model):
    """A key of the API, kept only as the SHA-256 of its text.

    `prefix` is the start of the key's text, to recognise it by. A key works while it is not paused, revoked or
    expired and its User is active.
    """

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="api_keys")
    name = models.CharField(max_length=100)
    prefix = models.CharField(max_length=20)
    digest = models.BinaryField(max_length=32, unique=True, editable=False)
    token_cap = models.PositiveBigIntegerField(
        null=True, blank=True, help_text="Tokens that this key may spend in a month; empty means the User's Budget."
    )
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    paused_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        verbose_name = "API key"
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"

    @property
    def state(self) -> str:
        """`working`, `paused`, `expired` or `revoked`."""
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= timezone.now():
            return "expired"
        return "paused" if self.paused_at is not None else "working"

    @property
    def is_working(self) -> bool:
        """Whether requests with this key are taken, as far as the key goes."""
        return self.state == "working"
