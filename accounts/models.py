"""Users and API keys."""

from typing import ClassVar

from django.conf import settings
from django.contrib.auth.models import AbstractUser, UserManager
from django.contrib.sessions.models import Session
from django.core.exceptions import ValidationError
from django.db import models
from django.db.models.functions import Lower
from django.utils import timezone

from accounts.generations import ChangesNoted


class Users(UserManager["User"]):
    """Django's manager of Users, whose changes are noted."""

    use_in_migrations = False

    def get_queryset(self) -> ChangesNoted["User"]:
        """All Users."""
        return ChangesNoted(self.model, using=self._db)


class ApiKeys(models.Manager["ApiKey"]):
    """The manager of keys, whose changes are noted."""

    def get_queryset(self) -> ChangesNoted["ApiKey"]:
        """All keys."""
        return ChangesNoted(self.model, using=self._db)


class User(AbstractUser):
    """A person who signs in and owns keys, jobs and a Budget.

    The nullable limits override the settings of the same name for this User; null means the setting.
    """

    email = models.EmailField(unique=True)
    awaits_approval = models.BooleanField(
        default=False, db_default=False, help_text="Signed up, and cannot sign in before an operator says yes."
    )
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
    objects: ClassVar[Users] = Users()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                Lower("email"),
                name="accounts_user_email_unique",
                violation_error_message="A User with this e-mail address already exists.",
            )
        ]

    def clean(self) -> None:
        """Check the address against other Users', whatever its case, so that a form names the field."""
        super().clean()
        if User.objects.filter(email__iexact=self.email).exclude(pk=self.pk).exists():
            raise ValidationError({"email": "A User with this e-mail address already exists."})


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

    objects = ApiKeys()

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


class Invitation(models.Model):
    """A link that makes one account, kept only as the SHA-256 of its token; it is used once, until it expires."""

    digest = models.BinaryField(max_length=32, unique=True, editable=False)
    email = models.EmailField(blank=True, help_text="Whom it is for, if it is for one address alone.")
    made_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, editable=False, related_name="invitations"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, editable=False)
    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, editable=False, related_name="invitation"
    )

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return f"invitation of {self.created_at:%Y-%m-%d}" + (f" for {self.email}" if self.email else "")

    @property
    def is_open(self) -> bool:
        """Whether an account can be made with it still."""
        return self.used_at is None and self.expires_at > timezone.now()


class SignIn(models.Model):
    """A browser that is signed in: it is there as long as its session."""

    session = models.OneToOneField(Session, on_delete=models.CASCADE, primary_key=True, related_name="sign_in")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="sign_ins")
    address = models.GenericIPAddressField(null=True)
    agent = models.CharField(max_length=300, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return f"{self.user} since {self.created_at:%Y-%m-%d %H:%M}"

    @property
    def browser(self) -> str:
        """The browser and system that it said it was, in two words."""
        return browser_name(self.agent)


# The first that an agent names counts: Chrome says that it is Safari too, and Edge that it is Chrome.
_BROWSERS = (("Edg", "Edge"), ("OPR", "Opera"), ("Firefox", "Firefox"), ("Chrom", "Chrome"), ("Safari", "Safari"))
_SYSTEMS = (("Android", "Android"), ("iPhone", "iOS"), ("iPad", "iPadOS"), ("Windows", "Windows"), ("Mac OS", "macOS"))


def browser_name(agent: str) -> str:
    """`Firefox on Linux`: what a User-Agent header says, in words that a person knows."""
    browser = next((name for mark, name in _BROWSERS if mark in agent), "A browser")
    system = next((name for mark, name in (*_SYSTEMS, ("Linux", "Linux")) if mark in agent), "")
    return f"{browser} on {system}" if system else browser
