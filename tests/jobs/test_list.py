"""The list of Jobs: pages of any size add up to all that fit, newest first, whatever is submitted meanwhile."""

import uuid

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accounts.models import User
from acsinfra.core.errors import ApiError
from acsinfra.core.listing import ListQuery
from inference.models import BaseModel
from jobs import services
from jobs.models import CompletionJob
from jobs.selectors import list_jobs
from tests.harvest.conftest import make_key, make_model, make_user
from tests.jobs.conftest import submit

SUBMITS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["tiny", "other"]), st.booleans()), max_size=12)


def read_all(
    user: User, limit: int, late: tuple[User, BaseModel] | None, *, status: str | None, model: str | None
) -> list[uuid.UUID]:
    """Follow the cursor from the first page to the last; between pages another Job may come."""
    found: list[uuid.UUID] = []
    after = None
    while True:
        page = list_jobs(user, ListQuery(limit=limit, after=after, status=status, model=model))
        assert len(page.rows) <= limit
        found += [job.pk for job in page.rows]
        if not page.has_more:
            return found
        assert len(page.rows) == limit
        after = page.rows[-1].pk
        if late is not None:
            submit(late[0], None, late[1])


@pytest.mark.django_db
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    submits=SUBMITS,
    limit=st.integers(1, 5),
    status=st.sampled_from([None, "queued", "cancelled", "failed"]),
    model=st.sampled_from([None, "tiny", "other", "none"]),
    comes_late=st.booleans(),
)
def test_the_pages_are_all_of_the_users_jobs_newest_first(
    submits: list[tuple[str, str, bool]], limit: int, status: str | None, model: str | None, comes_late: bool
) -> None:
    CompletionJob.objects.all().delete()
    models = {name: BaseModel.objects.filter(name=name).first() or make_model(name) for name in ("tiny", "other")}
    users = {
        name: User.objects.filter(username=name).first() or make_user(name, jobs_unfinished=100) for name in ("a", "b")
    }
    expected: list[uuid.UUID] = []
    for name, base_model, is_cancelled in submits:
        job = submit(users[name], None, models[base_model])
        if is_cancelled:
            services.cancel_job(job_id=job.pk)
        fits = status in (None, "cancelled" if is_cancelled else "queued") and model in (None, base_model)
        if name == "a" and fits:
            expected.insert(0, job.pk)
    late = (users["a"], models["tiny"]) if comes_late else None
    assert read_all(users["a"], limit, late, status=status, model=model) == expected


@pytest.mark.django_db
def test_a_cursor_that_is_none_of_theirs_is_refused(user: User, model: BaseModel) -> None:
    stranger = make_user("bob")
    theirs = submit(stranger, make_key(stranger), model)
    for after in (theirs.pk, uuid.UUID(int=1)):
        with pytest.raises(ApiError) as refused:
            list_jobs(user, ListQuery(limit=5, after=after))
        assert (refused.value.status, refused.value.param) == (400, "after")
