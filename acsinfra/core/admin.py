"""What every admin here shares: lists that are cheap on any table, actions with a question, an audit log that says how.

A list never counts its table: it counts what it finds up to COUNTED_AT_MOST, and an operator narrows it by a search or
a filter. Both go by indexes. Each action acts on one row in one transaction with its entry in the audit log.
"""

import functools
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import unquote
from django.contrib.admin.widgets import AutocompleteSelect
from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db import IntegrityError, OperationalError, transaction
from django.db.models import ForeignKey, Model, Q, QuerySet
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.text import capfirst
from psycopg.errors import DeadlockDetected

from acsinfra.core.errors import ApiError

COUNTED_AT_MOST: Final = 1_000
# What one action takes: each row is a transaction of its own, and the operator waits for all.
ROWS_AT_ONCE: Final = 200
USERS_FOUND_AT_MOST: Final = 100
EMPTY: Final = "empty"
_WORDS: Final = {"api": "API", "bos": "BOS", "gpu": "GPU", "gpus": "GPUs", "kv": "KV", "usd": "USD", "n": "number of"}
_SECRET_FIELDS: Final = frozenset({"password", "password1", "password2", "usable_password"})


class CappedPaginator(Paginator[Any]):
    """Pages over the first COUNTED_AT_MOST rows. Counting stops there: a COUNT(*) reads a whole table."""

    at_most = COUNTED_AT_MOST

    @cached_property
    def _counted(self) -> int:
        # Sliced, the count keeps the order, and so walks the index that gives it.
        return int(self.object_list[: COUNTED_AT_MOST + 1].count())  # type: ignore[attr-defined]

    @property
    def is_capped(self) -> bool:
        """Whether there are more rows than the pages show."""
        return self._counted > COUNTED_AT_MOST

    @cached_property
    def count(self) -> int:
        """The rows that the pages show."""
        return min(self._counted, COUNTED_AT_MOST)


class _ChoiceById(AutocompleteSelect):
    """Django's, without its server error when a form comes back with an id that is none."""

    def optgroups(self, name: str, value: Sequence[str], attr: dict[str, Any] | None = None) -> Any:
        """The rows chosen, of those ids that are some."""
        return super().optgroups(name, [each for each in value if self._is_id(each)], attr)

    def _is_id(self, text: str) -> bool:
        try:
            self.field.remote_field.model._meta.pk.to_python(text)
        except ValidationError:
            return False
        return True


class PlatformAdmin[M: Model](admin.ModelAdmin[M]):
    """The base of our admins: capped pages, no sorting by columns without an index, an audit log that says how."""

    paginator = CappedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    list_max_show_all = 0
    sortable_by: ClassVar[tuple[str, ...]] = ()
    actions_selection_counter = True

    def get_form(self, request: HttpRequest, obj: M | None = None, change: bool = False, **kwargs: Any) -> Any:
        """Django's, with words where it would make a label of a field's name: "GPU", not "Gpu"."""
        named = {field.name: words_of(str(field.verbose_name)) for field in self.opts.fields}
        labels = {name: words for name, words in named.items() if words != capfirst(name.replace("_", " "))}
        return super().get_form(request, obj, change=change, labels=labels, **kwargs)

    def formfield_for_foreignkey(self, db_field: ForeignKey[Any], request: HttpRequest, **kwargs: Any) -> Any:
        """Django's, with our widget where rows are searched for."""
        if db_field.name in self.get_autocomplete_fields(request):
            kwargs.setdefault("widget", _ChoiceById(db_field, self.admin_site))
        return super().formfield_for_foreignkey(db_field, request, **kwargs)

    def get_actions(
        self, request: HttpRequest, action_location: admin.ActionLocation = admin.ActionLocation.CHANGE_LIST
    ) -> dict[str, Any]:
        """Django's, without its deletion of many rows at once, which asks no service and no row."""
        actions = super().get_actions(request, action_location=action_location)
        actions.pop("delete_selected", None)
        return actions

    def response_action(
        self,
        request: HttpRequest,
        queryset: QuerySet[M],
        action_location: admin.ActionLocation = admin.ActionLocation.CHANGE_LIST,
    ) -> HttpResponse | None:
        """Django's, without its server error for an id that is none."""
        pk = self.opts.pk
        try:
            for chosen in request.POST.getlist(ACTION_CHECKBOX_NAME):
                pk.to_python(chosen)
        except ValidationError:
            messages.error(request, "What was chosen is not here.")
            return HttpResponseRedirect(request.get_full_path())
        return super().response_action(request, queryset, action_location=action_location)

    def lock_for_deletion(self, obj: M) -> None:
        """Lock what goes with `obj` in the order in which others do, for a deletion that Django would do in its own."""

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Django's, without its server error where work began meanwhile that needs the row, or locks it."""
        try:
            with transaction.atomic():
                if request.method == "POST" and (obj := self.get_object(request, unquote(object_id))) is not None:
                    self.lock_for_deletion(obj)
                return super().delete_view(request, object_id, extra_context)
        except (IntegrityError, OperationalError) as error:
            if isinstance(error, OperationalError) and not isinstance(error.__cause__, DeadlockDetected):
                raise
            messages.error(request, "Nothing was deleted: work that needs it went on meanwhile. Stop that first.")
            return HttpResponseRedirect(
                reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_change", args=[object_id])
            )

    def construct_change_message(  # type: ignore[override]
        self, request: HttpRequest, form: ModelForm[Any], formsets: Any, add: bool = False
    ) -> Any:
        """What the audit log says of a saved form: each field that changed, from what to what."""
        if add or not form.changed_data or any(formset.has_changed() for formset in formsets or ()):
            return super().construct_change_message(request, form, formsets, add)  # type: ignore[arg-type]
        return "; ".join(_change(form, name) for name in form.changed_data) + "."


def lock_rows(rows: QuerySet[Any]) -> None:
    """Lock each of `rows` until the transaction ends."""
    list(rows.select_for_update(of=("self",)).order_by("pk").values_list("pk", flat=True))


def words_of(name: str) -> str:
    """A label for the name of a field, which begins large and has acronyms as they are written."""
    return capfirst(" ".join(_WORDS.get(word, word) for word in name.split()))


def _change(form: ModelForm[Any], name: str) -> str:
    field = form.fields.get(name)
    label = capfirst(str((field and field.label) or name.replace("_", " ")))
    # Django's form for a new password names a field that it does not have.
    if field is None or name in _SECRET_FIELDS:
        return f"{label} changed"
    before, after = form.get_initial_for_field(field, name), form.cleaned_data.get(name)
    return f"{label}: {_shown(before)} → {_shown(after)}"


def _shown(value: Any) -> str:
    if value is None or value == "":
        return EMPTY
    if isinstance(value, QuerySet):
        return ", ".join(map(str, value)) or EMPTY
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


class ReadOnly:
    """For rows that the services alone write: an operator reads them, and acts through actions."""

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Never."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Never."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Never."""
        return False


# Actions


def operator_action(
    description: str, *, question: str = "", permission: str = "change", on_its_page: bool = True
) -> Callable[[Callable[[Any, HttpRequest, Any], str | None]], Any]:
    """An action on each chosen row, from the list and the row's own page.

    The decorated method acts on one row and returns what the audit log is to say, or None where there was nothing to
    do. `question` is asked first, where there is one. A row that a service refuses is named, and the others go on.
    """

    def decorate(act: Callable[[Any, HttpRequest, Any], str | None]) -> Any:
        def run(self: PlatformAdmin[Any], request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponseBase | None:
            rows = list(queryset[:ROWS_AT_ONCE])
            if question and "confirmed" not in request.POST:
                return _ask(self, request, rows, description=description, question=question)
            _act_on_each(self, request, rows, functools.partial(act, self, request), description=description)
            return None

        places = [admin.ActionLocation.CHANGE_LIST]
        if on_its_page:
            places.append(admin.ActionLocation.CHANGE_FORM)
        functools.update_wrapper(run, act)
        return admin.action(run, description=description, permissions=[permission], location=places)

    return decorate


def _ask(
    model_admin: PlatformAdmin[Any], request: HttpRequest, rows: list[Any], *, description: str, question: str
) -> HttpResponseBase:
    kept = {name: request.POST.getlist(name) for name in request.POST if name.endswith("action") or name == "index"}
    context = {
        **model_admin.admin_site.each_context(request),
        "title": description,
        "question": question,
        "opts": model_admin.opts,
        "rows": rows,
        "rows_at_once": ROWS_AT_ONCE,
        "checkbox_name": ACTION_CHECKBOX_NAME,
        "kept": [(name, value) for name, values in kept.items() if name != ACTION_CHECKBOX_NAME for value in values],
    }
    return TemplateResponse(request, "admin/confirm_action.html", context)


def _act_on_each(
    model_admin: PlatformAdmin[Any],
    request: HttpRequest,
    rows: Iterable[Any],
    act: Callable[[Any], str | None],
    *,
    description: str,
) -> None:
    done = idle = 0
    for row in rows:
        try:
            with transaction.atomic():
                said = act(row)
                if said is not None:
                    model_admin.log_change(request, row, said)
        except (ApiError, ValidationError) as error:
            text = error.message if isinstance(error, ApiError) else "; ".join(error.messages)
            messages.error(request, f"{row}: {text}")
            continue
        done += said is not None
        idle += said is None
    if done:
        messages.success(request, f"{description}: done for {done}.")
    if idle:
        messages.info(request, f"{description}: nothing to do for {idle}.")


# Searches and filters that go by indexes


class SearchedByIdAndUser[M: Model](PlatformAdmin[M]):
    """A search for rows by their UUID, or the start of it (they are made in order of time), else by their User.

    One after the other, because an OR of both would read the whole table.
    """

    search_fields = ("id",)
    search_help_text = "An id, or the first 8 digits or more of one; a User's name or address."

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """The rows for `search_term`."""
        term = search_term.strip()
        if not term or "\0" in term:
            return queryset if not term else queryset.none(), False
        ids = self.ids_like(queryset, term)
        if ids:
            return queryset.filter(pk__in=ids), False
        users = users_like(term)
        return (queryset.filter(self.of_users(users)) if users else queryset.none()), False

    def ids_like(self, queryset: QuerySet[Any], term: str) -> list[Any]:
        """The ids that `term` is, or begins; at most COUNTED_AT_MOST."""
        span = uuid_span(term)
        if span is None:
            return []
        rows = queryset.model._default_manager.filter(pk__gte=span[0], pk__lte=span[1])
        return list(rows.order_by("-pk").values_list("pk", flat=True)[:COUNTED_AT_MOST])

    def of_users(self, users: Sequence[int]) -> Q:
        """The rows of these Users, by an index."""
        return Q(user__in=users)


def users_like(term: str) -> list[int]:
    """The ids of Users whose name or address holds `term`, at most 100."""
    users = get_user_model()._default_manager.filter(Q(username__icontains=term) | Q(email__icontains=term))
    return list(users.order_by("pk").values_list("pk", flat=True)[:USERS_FOUND_AT_MOST])


def uuid_span(text: str) -> tuple[uuid.UUID, uuid.UUID] | None:
    """The first and the last UUID whose hex digits start with `text`; None where it is not 8 digits or more of one."""
    digits = text.lower().replace("-", "").removeprefix("req_job_")
    if not 8 <= len(digits) <= 32 or not set(digits) <= set("0123456789abcdef"):
        return None
    return uuid.UUID(digits.ljust(32, "0")), uuid.UUID(digits.ljust(32, "f"))


def uuid7_at(moment: datetime) -> uuid.UUID:
    """The least UUIDv7 of `moment`: rows made since have a greater id."""
    return uuid.UUID(int=int(moment.timestamp() * 1000) << 80 | 0x7 << 76)


class MadeFilter(admin.SimpleListFilter):
    """When the row was made, by its UUIDv7: the primary key's index answers."""

    title = "time"
    parameter_name = "made"
    _PAST: ClassVar[dict[str, tuple[str, timedelta]]] = {
        "hour": ("Past hour", timedelta(hours=1)),
        "day": ("Past 24 hours", timedelta(days=1)),
        "week": ("Past 7 days", timedelta(days=7)),
    }

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """What an operator may choose."""
        past = [(name, words) for name, (words, _) in self._PAST.items()]
        return [*past, ("month", "This month (UTC)"), ("last-month", "Last month (UTC)")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """The rows of that time."""
        choice = self.value()
        if choice is None:
            return queryset
        now = timezone.now()
        month = now.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        if choice in self._PAST:
            return queryset.filter(pk__gte=uuid7_at(now - self._PAST[choice][1]))
        if choice == "month":
            return queryset.filter(pk__gte=uuid7_at(month))
        if choice != "last-month":
            return queryset
        last = (month - timedelta(days=1)).replace(day=1)
        return queryset.filter(pk__gte=uuid7_at(last), pk__lt=uuid7_at(month))
