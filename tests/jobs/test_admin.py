"""The admin's lists stay cheap on large tables, and its actions go through the services and into the audit log."""

import re
import uuid

import django.core.mail
import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from accounts.invitations import ask_for_account
from accounts.models import ApiKey, User
from acsinfra.core.errors import ApiError, ErrorCode
from budgets.models import LedgerEntry
from harvest.models import HarvestCorpus, HarvestJob
from harvest.services import cancel_harvest, submit_harvest
from inference.models import BaseModel
from jobs import running
from jobs.models import CompletionJob, JobRequest
from tests.benchmarks.job_rows import fill
from tests.harvest.conftest import plan_for
from tests.jobs.conftest import OWNER, assert_money, claim, claimed, submit

pytestmark = pytest.mark.django_db

QUERIES_AT_MOST = 10
ROWS = 6_000
BIG = ("jobs_completionjob", "budgets_hold", "budgets_ledgerentry")
# Each ended Job with its Hold and its charge, one Budget a User.
MONEY = """
INSERT INTO budgets_budget (user_id, month, token_limit, ceiling, used, held)
SELECT id, date_trunc('month', now())::date, 1000000, 1000000, 0, 0 FROM accounts_user;
INSERT INTO budgets_hold (id, budget_id, tokens, state, charged, work_kind, work_id, holder, taken_at, ended_at)
SELECT uuidv7(-(now() - j.created_at)), b.id, 24, 'settled', 24, 'job', j.id::text, '', j.created_at, j.created_at
  FROM jobs_completionjob j JOIN budgets_budget b ON b.user_id = j.user_id WHERE j.status = 'succeeded';
INSERT INTO budgets_ledgerentry (hold_id, budget_id, tokens, work_kind, work_id, charged_at)
SELECT id, budget_id, charged, work_kind, work_id, ended_at FROM budgets_hold;
ANALYZE jobs_completionjob; ANALYZE budgets_hold; ANALYZE budgets_ledgerentry; ANALYZE accounts_user;
ANALYZE budgets_budget;
"""


@pytest.fixture
def operator() -> Client:
    client = Client(headers={"host": "testserver"})
    client.force_login(User.objects.create_superuser("operator", "operator@example.org"))
    return client


@pytest.fixture
def years(model: BaseModel) -> None:
    """Fill the tables as years would."""
    fill(model_name=model.name, ended=ROWS, waiting=200)
    with connection.cursor() as cursor:
        cursor.execute(MONEY)


def test_lists_of_large_tables_read_no_whole_table(operator: Client, years: None) -> None:
    job = CompletionJob.objects.filter(status="succeeded").order_by("pk")[ROWS // 2]
    work = LedgerEntry.objects.get(work_id=str(job.pk))
    pages = {
        "jobs/completionjob": [
            "",
            "status__exact=failed",
            "status__exact=queued",
            f"q={job.pk}",
            "q=req_job_" + job.pk.hex,
        ],
        "budgets/hold": ["", "state__exact=live", "state__exact=released", f"q={work.work_id}"],
        "budgets/ledgerentry": ["", f"q={work.work_id}"],
    }
    for page, queries in pages.items():
        for query in (*queries, "p=3", "made=day", "made=last-month", f"q={job.user.username}", "q=nobody-at-all"):
            url = f"/admin/{page}/?{query}"
            with CaptureQueriesContext(connection) as captured:
                answer = operator.get(url)
            assert answer.status_code == 200, url
            statements = [entry["sql"] for entry in captured.captured_queries]
            assert len(statements) <= QUERIES_AT_MOST, url
            _assert_indexed(url, statements)
            # Joined to the list, the Holds were read from the newest down to the page's.
            assert not any('"budgets_ledgerentry" INNER JOIN "budgets_hold"' in one for one in statements), url
            if query.startswith("q=") and "nobody" not in query:
                assert answer.context["cl"].result_count >= 1, url
    first = operator.get("/admin/jobs/completionjob/")
    assert "The first 1000 Completion Jobs" in first.content.decode()


def _assert_indexed(url: str, statements: list[str]) -> None:
    for statement in statements:
        if not statement.startswith("SELECT") or not any(table in statement for table in BIG):
            continue
        # A count stops at the most that the pages show.
        assert "COUNT(" not in statement or "LIMIT" in statement, f"{url}\n{statement}"
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN {statement}")
            plan = "\n".join(row[0] for row in cursor.fetchall())
        assert not re.search(rf"Seq Scan on ({'|'.join(BIG)})", plan), f"{url}\n{statement}\n{plan}"


def test_a_job_is_cancelled_after_a_question_and_the_audit_log_says_who(
    operator: Client, user: User, key: ApiKey, model: BaseModel
) -> None:
    submit(user, key, model)
    job = claimed(model)
    url, chosen = "/admin/jobs/completionjob/", {"action": "cancel", "_selected_action": [str(job.pk)]}
    question = operator.post(url, chosen)
    assert "Cancel these Jobs?" in question.content.decode()
    job.refresh_from_db()
    assert job.status == "running"
    operator.post(url, {**chosen, "confirmed": "yes"})
    job.refresh_from_db()
    assert job.status == "cancelled"
    assert_money(user, used=0)
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.object_id, entry.change_message) == ("operator", str(job.pk), "Cancelled.")
    operator.post(url, {**chosen, "confirmed": "yes"})
    assert LogEntry.objects.count() == 1


def test_a_failed_job_s_page_says_why_and_its_numbers_are_read_at_a_glance(
    operator: Client, user: User, model: BaseModel
) -> None:
    job = submit(user, None, model)
    claimed(model)
    error = ApiError(ErrorCode.ENGINE_TIMEOUT, "It took too long.")
    running.fail_running_job(job_id=job.pk, owner=OWNER, tokens=7, error=error)
    CompletionJob.objects.update(hold_tokens=1_234_567)
    page = operator.get(f"/admin/jobs/completionjob/{job.pk}/change/").content.decode()
    assert "504 engine_timeout: It took too long." in page
    assert "1,234,567" in page
    assert "API key:" in page
    assert "USD per day" in operator.get("/admin/budgets/spendlimit/add/").content.decode()


def test_an_ended_job_is_run_again_and_what_it_holds_erased(
    operator: Client, user: User, key: ApiKey, model: BaseModel
) -> None:
    job = submit(user, key, model)
    url = "/admin/jobs/completionjob/"

    def act(action: str) -> None:
        operator.post(url, {"action": action, "_selected_action": [str(job.pk)], "confirmed": "yes"})

    act("run_again")
    act("erase")
    assert CompletionJob.objects.count() == JobRequest.objects.count() == 1, "it has not ended"
    act("cancel")
    act("run_again")
    again = CompletionJob.objects.exclude(pk=job.pk).get()
    assert (again.status, again.user, again.api_key, again.hold_tokens) == ("queued", user, key, job.hold_tokens)
    ran = claim(model)
    assert ran is not None
    assert (ran.id, ran.work.request_id) == (again.pk, again.request_id)
    act("erase")
    assert CompletionJob.objects.get(pk=job.pk).is_erased
    act("run_again")
    assert CompletionJob.objects.count() == 2, "its request is gone"
    said = [entry.change_message for entry in LogEntry.objects.order_by("pk")]
    assert said == ["Cancelled.", f"Run again, as Completion Job {again.pk}.", "Request and result erased."]


def test_a_harvest_is_run_again_from_its_own_page_and_its_files_deleted(
    operator: Client, user: User, key: ApiKey, model: BaseModel
) -> None:
    first = submit_harvest(user=user, api_key=key, plan=plan_for(model))
    url = f"/admin/harvest/harvestjob/{first.pk}/change/"

    def act(action: str, job: HarvestJob) -> None:
        form = {"CHANGE_FORM-action": action, "_selected_action": str(job.pk), "confirmed": "yes"}
        assert operator.post(f"/admin/harvest/harvestjob/{job.pk}/change/", form).status_code == 302

    assert "CHANGE_FORM-action" in operator.get(url).content.decode()
    act("run_again", first)
    assert HarvestJob.objects.count() == 1, "it has not ended"
    cancel_harvest(job_id=first.pk)
    act("run_again", first)
    again = HarvestJob.objects.exclude(pk=first.pk).get()
    assert (again.status, again.user, again.api_key) == ("pending", user, key)
    assert (again.layers, again.reserved_tokens) == (first.layers, first.reserved_tokens)
    corpora = HarvestCorpus.objects.values_list("prompts_zstd", flat=True)
    assert len({bytes(prompts) for prompts in corpora}) == 1
    assert_money(user, used=0, held=first.reserved_tokens)
    act("delete_their_files", first)
    first.refresh_from_db()
    assert first.files_deleted_at is not None
    act("run_again", first)
    assert HarvestJob.objects.count() == 2, "its prompts are gone"
    assert [entry.change_message for entry in LogEntry.objects.order_by("pk")] == [
        f"Run again, as Harvest job {again.pk}.",
        "Files and prompts deleted.",
    ]


def test_the_audit_log_cannot_be_changed_and_keeps_its_operators(operator: Client, key: ApiKey) -> None:
    operator.post("/admin/accounts/apikey/", {"action": "pause", "_selected_action": [key.pk]})
    entry = LogEntry.objects.get()
    page = operator.get("/admin/admin/logentry/?q=operator").content.decode()
    assert "Paused." in page
    assert operator.post(f"/admin/admin/logentry/{entry.pk}/delete/", {"post": "yes"}).status_code == 403
    assert operator.post(f"/admin/admin/logentry/{entry.pk}/change/", {"change_message": "no"}).status_code == 403
    assert operator.get("/admin/admin/logentry/add/").status_code == 403
    operator.post(f"/admin/accounts/user/{entry.user_id}/delete/", {"post": "yes"})
    assert LogEntry.objects.count() == 1


def test_a_suspended_user_is_out_and_an_approved_one_is_in(operator: Client, user: User, key: ApiKey) -> None:
    theirs = Client(headers={"host": "testserver"})
    theirs.force_login(user)
    chosen = {"_selected_action": [user.pk], "confirmed": "yes"}
    operator.post("/admin/accounts/user/", {"action": "suspend", **chosen})
    user.refresh_from_db()
    assert not user.is_active
    assert theirs.get("/app").status_code == 302
    operator.post("/admin/accounts/user/", {"action": "approve", **chosen})
    assert theirs.get("/app").status_code == 302, "its sessions have ended"
    theirs.force_login(user)
    assert theirs.get("/app").status_code == 200
    me = LogEntry.objects.first()
    assert me is not None
    operator.post("/admin/accounts/user/", {"action": "suspend", "_selected_action": [me.user_id], "confirmed": "yes"})
    assert User.objects.get(pk=me.user_id).is_active


def test_who_asked_for_an_account_is_approved_and_told(operator: Client) -> None:
    user = ask_for_account(username="grace", email="grace@example.org", password="a lamp in the window")
    assert "grace" in operator.get("/admin/accounts/user/?awaits_approval__exact=1").content.decode()
    operator.post("/admin/accounts/user/", {"action": "approve", "_selected_action": [user.pk]})
    user.refresh_from_db()
    assert (user.is_active, user.awaits_approval) == (True, False)
    assert [mail.to for mail in django.core.mail.outbox] == [["operator@example.org"], ["grace@example.org"]]
    assert [entry.change_message for entry in LogEntry.objects.all()] == ["Approved."]


def test_a_new_password_is_in_the_audit_log_and_its_text_is_not(operator: Client, user: User) -> None:
    form = {"usable_password": "true", "password1": "a lamp in the window", "password2": "a lamp in the window"}
    assert operator.post(f"/admin/accounts/user/{user.pk}/password/", form).status_code == 302
    user.refresh_from_db()
    assert user.check_password("a lamp in the window")
    entry = LogEntry.objects.get()
    assert (entry.object_repr, entry.change_message) == (user.username, "Password changed.")


def test_odd_searches_and_ids_break_nothing(operator: Client, user: User, key: ApiKey, model: BaseModel) -> None:
    submit(user, key, model)
    for page in ("jobs/completionjob", "harvest/harvestjob", "budgets/hold", "budgets/ledgerentry", "admin/logentry"):
        for term in ("%00", "é%'\"\\", "f" * 33, "x" * 3_000, str(uuid.UUID(int=0))):
            assert operator.get(f"/admin/{page}/", {"q": term}).status_code == 200
        assert operator.get(f"/admin/{page}/none/change/").status_code == 302
        assert operator.get(f"/admin/{page}/?p=none&made=never").status_code in (200, 302)
        for address in (f"/admin/{page}/?pk__exact=%00", f"/admin/{page}/%00/change/"):
            assert operator.get(address).status_code == 400
    body = {"action": "cancel", "_selected_action": ["none"], "confirmed": "yes"}
    assert operator.post("/admin/jobs/completionjob/", body).status_code == 302
    assert operator.post("/admin/accounts/user/", body | {"action": "suspend"}).status_code == 302
    job = CompletionJob.objects.get()
    own_page = {"CHANGE_FORM-action": "cancel", "_selected_action": "none", "confirmed": "yes"}
    assert operator.post(f"/admin/jobs/completionjob/{job.pk}/change/", own_page).status_code == 400
    assert CompletionJob.objects.get().status == "queued"
