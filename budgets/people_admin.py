"""Users and keys in the admin, with their money: the Budget of a User on the User's page, a key's cap at once."""

from collections.abc import Sequence
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.forms import UserChangeForm
from django.db.models import CASCADE, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.http import urlencode

from accounts.admin import ApiKeyAdmin, UserAdmin
from accounts.models import ApiKey, User
from acsinfra.core.admin import ReadOnly, lock_rows, words_of
from acsinfra.core.leases import LeasedWork
from budgets.limits import apply_key_cap, set_monthly_tokens
from budgets.models import Budget, Hold, KeyUse, LedgerEntry, MonthlyLimit
from budgets.selectors import budget_summary

INT64_MAX = 2**63 - 1
COMPUTED = ("this_month", "work")


class UserForm(UserChangeForm[User]):
    """A User, with the tokens that they may spend in a month, and what each empty limit means."""

    monthly_tokens = forms.IntegerField(required=False, min_value=0, max_value=INT64_MAX)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        limit = MonthlyLimit.objects.filter(user=self.instance.pk).first()
        self.initial["monthly_tokens"] = limit.monthly_tokens if limit else None
        for name, field in self.fields.items():
            if hasattr(settings, name.upper()):
                setting = getattr(settings, name.upper())
                field.widget.attrs["placeholder"] = "no limit" if setting is None else f"{setting:,}"
        self.fields["monthly_tokens"].help_text = "Tokens that the User may spend in a calendar month (UTC)."


class KeysInline(ReadOnly, admin.TabularInline[ApiKey, User]):
    """The User's keys, to read."""

    model = ApiKey
    fields = ("name", "prefix", "state", "token_cap", "expires_at", "last_used_at")
    readonly_fields = fields
    extra = 0
    show_change_link = True


class BudgetedUserAdmin(UserAdmin):
    """A User on one page: access, Budget, limits, keys, and the way to their work."""

    form: Any = UserForm
    inlines = (KeysInline,)

    def get_fieldsets(self, request: HttpRequest, obj: User | None = None) -> Any:
        """The Budget between access and limits."""
        fieldsets = super().get_fieldsets(request, obj)
        if obj is None:
            return fieldsets
        shown = ("monthly_tokens", *COMPUTED) if self.has_change_permission(request, obj) else COMPUTED
        return (*fieldsets[:2], ("Budget", {"fields": shown}), *fieldsets[2:])

    def get_readonly_fields(self, request: HttpRequest, obj: User | None = None) -> Any:
        """What is computed."""
        return (*super().get_readonly_fields(request, obj), *COMPUTED)

    def get_inlines(self, request: HttpRequest, obj: User | None = None) -> Any:
        """A User that is being added has no keys."""
        return self.inlines if obj else ()

    @admin.display(description="this month")
    def this_month(self, user: User) -> str:
        """The Budget as it stands."""
        budget = budget_summary(user)
        return (
            f"{budget.used:,} used, {budget.held:,} held, {budget.remaining:,} left of {budget.limit:,} tokens "
            f"(since {budget.month})"
        )

    @admin.display(description="work")
    def work(self, user: User) -> str:
        """Links to what the User ran."""
        query = urlencode({"q": user.username})
        links = [
            (reverse(f"admin:{name}_changelist"), words)
            for name, words in (
                ("jobs_completionjob", "Completion Jobs"),
                ("harvest_harvestjob", "Harvest jobs"),
                ("budgets_hold", "Holds"),
                ("budgets_ledgerentry", "ledger"),
            )
        ]
        parts = [format_html('<a href="{}?{}">{}</a>', url, query, words) for url, words in links]
        return format_html("{}, {}, {} and {}", *parts)

    def save_model(self, request: HttpRequest, obj: User, form: Any, change: bool) -> None:
        """Save; a changed limit of the Budget counts in the present month too."""
        super().save_model(request, obj, form, change)
        if change and "monthly_tokens" in form.changed_data:
            set_monthly_tokens(user=obj, monthly_tokens=form.cleaned_data["monthly_tokens"])

    def get_deleted_objects(
        self, objs: Sequence[User] | QuerySet[User], request: HttpRequest
    ) -> tuple[list[Any], dict[str, int], set[str], list[str]]:
        """What goes with a User, counted: Django would list every row, and a User may have a hundred thousand Jobs.

        All of it goes, files in storage too, whatever the admins of those rows allow: they are the User's. In the way
        stands work that runs, and what the User did as an operator.
        """
        (user,) = objs
        live = Hold.objects.filter(budget__user=user, ended_at=None).count()
        in_the_way = []
        if live:
            in_the_way.append(
                f"{live:,} live Holds: suspend the User, cancel their work, and come back once it has ended"
            )
        if user == request.user or LogEntry.objects.filter(user=user).exists():
            in_the_way.append("what they did as an operator stands in the audit log: suspend them instead")
        return [f"{user}, with all that is counted above and its files"], _belongings(user), set(), in_the_way

    def lock_for_deletion(self, obj: User) -> None:
        """Lock the User and what their requests and workers lock, in the order in which those do.

        Django deletes in an order of its own (the use of a key before its Budget, say), and a request of the User and
        the deletion would wait for each other. What the User sends meanwhile waits, and finds its key gone.
        """
        for relation in User._meta.related_objects:
            work: Any = relation.related_model
            if issubclass(work, LeasedWork):
                lock_rows(work._default_manager.filter(user=obj, status__in=(work.WAITING, work.RUNNING)))
        lock_rows(User.objects.filter(pk=obj.pk))
        lock_rows(ApiKey.objects.filter(user=obj))
        lock_rows(Budget.objects.filter(user=obj))
        lock_rows(KeyUse.objects.filter(budget__user=obj))


def _belongings(user: User) -> dict[str, int]:
    """How many rows of each kind go with the User; what goes with those (a Job's result, say) is not counted."""
    counted = {"Users": 1}
    for relation in User._meta.related_objects:
        if relation.on_delete is CASCADE:
            rows: Any = relation.related_model
            found = rows._default_manager.filter(**{relation.field.name: user}).count()
            counted[words_of(str(rows._meta.verbose_name_plural))] = found
    counted["Holds"] = Hold.objects.filter(budget__user=user).count()
    counted["Ledger entries"] = LedgerEntry.objects.filter(budget__user=user).count()
    return {kind: n for kind, n in counted.items() if n}


class CappedApiKeyAdmin(ApiKeyAdmin):
    """Keys, whose changed cap counts at once."""

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        """Save, and bring this month's use under the cap."""
        super().save_model(request, obj, form, change)
        if change and "token_cap" in form.changed_data:
            apply_key_cap(api_key_id=obj.pk)


admin.site.unregister((User, ApiKey))
admin.site.register(User, BudgetedUserAdmin)
admin.site.register(ApiKey, CappedApiKeyAdmin)
