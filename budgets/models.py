"""Budgets, Holds and the ledger. What must never be false about the money is a constraint of the database here."""

from django.conf import settings
from django.db import models
from django.db.models import F, Q

from accounts.models import ApiKey
from acsinfra.core.ids import new_uuid7


class MonthlyLimit(models.Model):
    """An operator's override of `settings.MONTHLY_TOKENS` for one User. Change it through `budgets.services`."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, primary_key=True, related_name="monthly_limit"
    )
    monthly_tokens = models.PositiveBigIntegerField(help_text="Tokens that the User may spend in a calendar month.")

    def __str__(self) -> str:
        return f"{self.user}: {self.monthly_tokens:,} tokens a month"


class Budget(models.Model):
    """The tokens of a User in one calendar month (UTC). It is made by the month's first Hold; nothing runs at midnight.

    New Holds compare with `token_limit`. `ceiling` is that limit, or what was used and held when an operator lowered
    the limit below it, so that the CHECK may stand whatever an operator does.
    """

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="budgets", db_index=False)
    month = models.DateField(help_text="The first day of the month.")
    token_limit = models.PositiveBigIntegerField()
    ceiling = models.PositiveBigIntegerField()
    used = models.PositiveBigIntegerField(default=0, help_text="Tokens charged: the sum of the ledger.")
    held = models.PositiveBigIntegerField(default=0, help_text="Tokens set aside: the sum of the live Holds.")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["user", "month"], name="budgets_budget_one_a_month"),
            models.CheckConstraint(condition=Q(month__day=1), name="budgets_budget_month_is_its_first_day"),
            models.CheckConstraint(
                condition=Q(ceiling__gte=F("used") + F("held")), name="budgets_budget_never_overspent"
            ),
            models.CheckConstraint(
                condition=Q(ceiling__gte=F("token_limit")), name="budgets_budget_ceiling_holds_the_limit"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.user}, {self.month:%Y-%m}"


class KeyUse(models.Model):
    """What one API key used and holds of a Budget, under the key's cap where it has one.

    `cap` follows `ApiKey.token_cap`; it stands here so that the row's lock covers it. The use of a deleted key stays.
    """

    budget = models.ForeignKey(Budget, on_delete=models.CASCADE, related_name="key_uses", db_index=False)
    api_key = models.ForeignKey(ApiKey, null=True, on_delete=models.SET_NULL, related_name="uses")
    prefix = models.CharField(max_length=20, help_text="The key's, to know a deleted one by.")
    cap = models.PositiveBigIntegerField(null=True)
    ceiling = models.PositiveBigIntegerField(null=True)
    used = models.PositiveBigIntegerField(default=0)
    held = models.PositiveBigIntegerField(default=0)

    class Meta:
        verbose_name = "use of a key"
        verbose_name_plural = "uses of keys"
        constraints = [
            models.UniqueConstraint(fields=["budget", "api_key"], name="budgets_keyuse_one_a_month"),
            models.CheckConstraint(
                condition=Q(ceiling__isnull=True) | Q(ceiling__gte=F("used") + F("held")),
                name="budgets_keyuse_never_overspent",
            ),
            models.CheckConstraint(
                condition=Q(cap__isnull=True, ceiling__isnull=True)
                | Q(cap__isnull=False, ceiling__isnull=False, ceiling__gte=F("cap")),
                name="budgets_keyuse_ceiling_holds_the_cap",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.prefix}…, {self.budget}"


class WorkKind(models.TextChoices):
    """What a Hold is for. `app` is work from the App (the Workbench), which has no key."""

    COMPLETION = "completion"
    JOB = "job"
    HARVEST = "harvest"
    APP = "app"


class Hold(models.Model):
    """Tokens set aside in a Budget while work runs. It ends once: settled (charged) or released, in its own month.

    `holder` names the process that answers for the work, and `expires_at` is when nobody can any more: sweeps look at
    both. A piece of work has at most one Hold that is live or settled, so that no work is charged twice.
    """

    class State(models.TextChoices):
        LIVE = "live"
        SETTLED = "settled"
        RELEASED = "released"

    id = models.UUIDField(primary_key=True, default=new_uuid7, editable=False)
    budget = models.ForeignKey(Budget, on_delete=models.CASCADE, related_name="holds", db_index=False)
    key_use = models.ForeignKey(KeyUse, null=True, on_delete=models.CASCADE, related_name="holds")
    tokens = models.PositiveBigIntegerField()
    state = models.CharField(max_length=10, choices=State, default=State.LIVE)
    charged = models.PositiveBigIntegerField(null=True, help_text="Tokens charged, once settled.")
    work_kind = models.CharField(max_length=10, choices=WorkKind)
    work_id = models.CharField(max_length=100)
    model = models.CharField(max_length=100, db_default="", help_text="The Base model's name, where the work has one.")
    holder = models.CharField(max_length=100, blank=True)
    taken_at = models.DateTimeField()
    expires_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(fields=["budget", "-id"], name="budgets_hold_of_budget"),
            models.Index(fields=["work_kind", "id"], condition=Q(state="live"), name="budgets_hold_live"),
            # For operators, who look for the few that charged nothing.
            models.Index(fields=["-id"], condition=Q(state="released"), name="budgets_hold_released"),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["work_kind", "work_id"], condition=~Q(state="released"), name="budgets_hold_one_a_work"
            ),
            models.CheckConstraint(
                condition=Q(state="live", charged__isnull=True, ended_at__isnull=True)
                | Q(state="settled", charged__isnull=False, charged__lte=F("tokens"), ended_at__isnull=False)
                | Q(state="released", charged__isnull=True, ended_at__isnull=False),
                name="budgets_hold_legal_state",
            ),
            models.CheckConstraint(
                condition=Q(work_kind__in=WorkKind.values) & ~Q(work_id=""), name="budgets_hold_names_its_work"
            ),
            models.CheckConstraint(
                condition=~Q(work_kind="app") | Q(key_use__isnull=True), name="budgets_hold_of_the_app_has_no_key"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens for {self.work_kind} {self.work_id} ({self.state})"


class LedgerEntry(models.Model):
    """One charge. Its primary key is the Hold that it settles: a Hold is settled once."""

    hold = models.OneToOneField(Hold, on_delete=models.CASCADE, primary_key=True, related_name="ledger_entry")
    budget = models.ForeignKey(Budget, on_delete=models.CASCADE, related_name="ledger", db_index=False)
    tokens = models.PositiveBigIntegerField()
    work_kind = models.CharField(max_length=10, choices=WorkKind)
    work_id = models.CharField(max_length=100)
    model = models.CharField(max_length=100, db_default="")
    charged_at = models.DateTimeField()

    class Meta:
        verbose_name_plural = "ledger"
        indexes = [models.Index(fields=["budget", "-hold"], name="budgets_ledger_of_budget")]
        constraints = [
            models.CheckConstraint(condition=Q(work_kind__in=WorkKind.values), name="budgets_ledger_names_its_work")
        ]

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens for {self.work_kind} {self.work_id}"


class SpendLimit(models.Model):
    """What GPU time may cost, in USD, in a calendar day and month (UTC), and the pause by hand. There is one row.

    An empty limit is none; a missing row is no limit and no pause.
    """

    ONLY = 1

    id = models.PositiveSmallIntegerField(primary_key=True, default=ONLY, editable=False)
    usd_per_day = models.DecimalField(
        max_digits=12, decimal_places=2, null=True, blank=True, help_text="Empty: no limit. 0: no new GPU work."
    )
    usd_per_month = models.DecimalField(
        max_digits=12, decimal_places=2, null=True, blank=True, help_text="Empty: no limit. 0: no new GPU work."
    )
    is_paused = models.BooleanField(default=False, help_text="New GPU work is refused; what runs goes on.")
    pause_ends_at = models.DateTimeField(null=True, blank=True, help_text="Empty: the pause ends by hand.")

    class Meta:
        verbose_name = "Spend limit"
        constraints = [
            models.CheckConstraint(condition=Q(id=1), name="budgets_spendlimit_only_one"),
            models.CheckConstraint(
                condition=(Q(usd_per_day__isnull=True) | Q(usd_per_day__gte=0))
                & (Q(usd_per_month__isnull=True) | Q(usd_per_month__gte=0)),
                name="budgets_spendlimit_not_negative",
                violation_error_message="A limit is 0 or more.",
            ),
        ]

    def __str__(self) -> str:
        return "Spend limit"


class GpuTime(models.Model):
    """How long one engine was up in one day (UTC), from `since` to `until`, which moves with its heartbeats.

    It costs (until - since) x gpus x usd_per_gpu_hour; a price that changes counts for the engine's whole day.
    """

    engine_id = models.UUIDField()
    day = models.DateField()
    model = models.CharField(max_length=100)
    kind = models.CharField(max_length=10)
    gpus = models.PositiveIntegerField()
    usd_per_gpu_hour = models.DecimalField(max_digits=10, decimal_places=4)
    since = models.DateTimeField()
    until = models.DateTimeField()

    class Meta:
        verbose_name = verbose_name_plural = "GPU time"
        constraints = [
            models.UniqueConstraint(fields=["day", "engine_id"], name="budgets_gputime_one_a_day"),
            models.CheckConstraint(condition=Q(until__gte=F("since")), name="budgets_gputime_goes_forward"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} of {self.model}, {self.day}"

    @property
    def gpu_seconds(self) -> float:
        """Seconds up x GPUs."""
        return (self.until - self.since).total_seconds() * self.gpus
