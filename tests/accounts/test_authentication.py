"""A request with a working key is let in by one indexed query at most; all other keys get one and the same 401."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import httpx
import psycopg
import pytest
from django.db import connection as orm_connection
from django.db import transaction
from django.utils import timezone

from accounts import authentication, rates, recent_keys, selectors, services
from accounts.keys import digest_of, new_key_text
from accounts.models import ApiKey
from acsinfra.core import db
from tests.live_server import LiveServer, make_key, make_user
from tests.tcp_proxy import proxy_to

pytestmark = pytest.mark.django_db(transaction=True)

ROUTE = "/v1/chat/completions"


def ask(server: LiveServer, key: str | None) -> httpx.Response:
    with server.client(key) as client:
        return client.post(ROUTE, json={})


def is_let_in(server: LiveServer, key: str) -> bool:
    code = ask(server, key).json()["error"]["code"]
    assert code in {"chat_completions_unsupported", "invalid_api_key"}
    return bool(code == "chat_completions_unsupported")


@pytest.fixture
async def pool() -> AsyncIterator[db.Pool]:
    yield await db.async_pool()
    await db.close_async_pool()


def test_a_new_key_works(server: LiveServer) -> None:
    assert is_let_in(server, make_key()[1])


def test_all_that_is_wrong_with_a_key_gives_one_answer(server: LiveServer) -> None:
    now = timezone.now()
    wrong = {
        "missing": None,
        "unknown": new_key_text(),
        "garbage": "nonsense",
        "paused": make_key(paused_at=now)[1],
        "revoked": make_key(revoked_at=now)[1],
        "expired": make_key(expires_at=now - timedelta(seconds=1))[1],
        "inactive": make_key(make_user(is_active=False))[1],
        "legacy": "acs-bm-" + "a" * 43,
    }
    answers = {name: ask(server, key) for name, key in wrong.items()}
    assert {name: answer.status_code for name, answer in answers.items()} == dict.fromkeys(wrong, 401)
    assert len({answer.content for answer in answers.values()}) == 1
    assert {answer.headers["WWW-Authenticate"] for answer in answers.values()} == {"Bearer"}
    first = answers["missing"].json()["error"]
    assert (first["code"], first["type"], first["param"]) == ("invalid_api_key", "authentication_error", None)


def test_a_key_that_will_expire_works_until_then(server: LiveServer) -> None:
    ends = timezone.now() + timedelta(seconds=1.5)
    _, text = make_key(expires_at=ends)
    while is_let_in(server, text):
        assert timezone.now() < ends + timedelta(seconds=60), "it works for ever"
        time.sleep(0.1)
    # It was let in until then, however long the machine took for each request.
    assert timezone.now() >= ends


def test_pause_resume_and_revoke_act_on_the_next_request(server: LiveServer) -> None:
    key, text = make_key()
    services.pause_key(key=key)
    assert not is_let_in(server, text)
    services.resume_key(key=key)
    assert is_let_in(server, text)
    services.revoke_key(key=key)
    services.resume_key(key=key)
    assert not is_let_in(server, text)


def test_a_legacy_key_works_once_imported(server: LiveServer) -> None:
    text = "acs-bm-0123456789abcdef"
    assert not is_let_in(server, text)
    ApiKey.objects.create(user=make_user(), name="old", prefix=text[:12], digest=digest_of(text))
    assert is_let_in(server, text)


def test_other_prefixes_are_refused_without_a_query(server: LiveServer) -> None:
    text = "sk-other-0123456789abcdef"
    ApiKey.objects.create(user=make_user(), name="odd", prefix=text[:12], digest=digest_of(text))
    assert not is_let_in(server, text)


class Spy:
    """Records the statements that the event loop's pool sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.statements: list[str] = []
        execute: Callable[..., Any] = psycopg.AsyncCursor.execute

        async def spy(cursor: Any, query: Any, *args: Any, **options: Any) -> Any:
            self.statements.append(str(query))
            return await execute(cursor, query, *args, **options)

        monkeypatch.setattr(psycopg.AsyncCursor, "execute", spy)


def test_requests_that_follow_each_other_closely_share_one_look(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text = make_key(last_used_at=timezone.now())
    # The first finds out which key to count, the second from which generation on its row may be kept.
    assert is_let_in(server, text)
    assert is_let_in(server, text)
    spy = Spy(monkeypatch)
    began = time.monotonic()
    for _ in range(5):
        assert is_let_in(server, text)
    assert len(spy.statements) <= 1 + (time.monotonic() - began) / recent_keys.KEPT_SECONDS
    monkeypatch.setattr(recent_keys, "KEPT_SECONDS", 3600)
    assert is_let_in(server, text)
    spy.statements.clear()
    for _ in range(5):
        assert is_let_in(server, text)
    assert spy.statements == []


@pytest.fixture
def kept_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that was looked up is kept for as long as the test takes."""
    monkeypatch.setattr(recent_keys, "KEPT_SECONDS", 3600)


def let_in_from_memory(server: LiveServer) -> tuple[ApiKey, str]:
    """A key whose next request would be let in without a look."""
    key, text = make_key(last_used_at=timezone.now())
    for _ in range(3):
        assert is_let_in(server, text)
    assert recent_keys.is_kept(digest_of(text))
    return key, text


@pytest.mark.usefixtures("kept_long")
@pytest.mark.parametrize(
    "change",
    [
        lambda key: services.pause_key(key=key),
        lambda key: services.revoke_key(key=key),
        lambda key: services.update_key(
            key=key, name="ended", token_cap=None, expires_at=timezone.now() - timedelta(seconds=1)
        ),
        lambda key: services.set_active(user=key.user, is_active=False),
        lambda key: key.delete(),
        lambda key: key.user.delete(),
        lambda key: ApiKey.objects.filter(pk=key.pk).delete(),
        lambda key: key.user.api_keys.update(paused_at=timezone.now()),
    ],
    ids=["pause", "revoke", "expire", "suspend", "delete", "delete the User", "delete some", "update some"],
)
def test_a_change_of_a_key_acts_on_the_next_request(server: LiveServer, change: Callable[[ApiKey], None]) -> None:
    key, text = let_in_from_memory(server)
    change(key)
    assert not is_let_in(server, text)


@pytest.mark.usefixtures("kept_long")
def test_a_change_acts_when_its_transaction_is_committed(server: LiveServer) -> None:
    key, text = let_in_from_memory(server)
    with transaction.atomic():
        services.revoke_key(key=key)
        assert is_let_in(server, text)
    assert not is_let_in(server, text)


@pytest.mark.usefixtures("kept_long")
def test_a_key_that_expires_meanwhile_is_not_taken_from_memory(server: LiveServer) -> None:
    ends = timezone.now() + timedelta(seconds=1.5)
    _, text = make_key(last_used_at=timezone.now(), expires_at=ends)
    while is_let_in(server, text):
        assert timezone.now() < ends + timedelta(seconds=60), "it works for ever"
        time.sleep(0.05)
    assert timezone.now() >= ends


def test_a_change_behind_djangos_back_acts_soon(server: LiveServer) -> None:
    key, text = let_in_from_memory(server)
    with orm_connection.cursor() as cursor:
        cursor.execute("UPDATE accounts_apikey SET revoked_at = now() WHERE id = %s", [key.pk])
    changed_at = time.monotonic()
    while is_let_in(server, text):
        assert time.monotonic() - changed_at < recent_keys.KEPT_SECONDS + 30
    assert not is_let_in(server, text)


@pytest.mark.usefixtures("kept_long")
def test_a_key_that_no_count_vouches_for_is_looked_up(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    key, text = let_in_from_memory(server)
    # Redis is away, and so nobody hears of the change.
    monkeypatch.setattr(rates, "_away_until", time.monotonic() + 3600)
    monkeypatch.setattr("accounts.generations._draw_generation", lambda: None)
    services.revoke_key(key=key)
    assert not is_let_in(server, text)


class SilentCourier:
    """A courier of a broker that never answers."""

    def ask(self, *arguments: object, patience: float) -> asyncio.Future[object]:
        return asyncio.get_running_loop().create_future()


@pytest.mark.usefixtures("kept_long")
def test_a_key_that_was_looked_up_just_now_is_let_in_while_redis_is_away(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text = let_in_from_memory(server)
    monkeypatch.setattr(rates, "shared_courier", SilentCourier)
    monkeypatch.setattr(rates, "PATIENCE_SECONDS", 0.1)
    # Each request tries anew.
    monkeypatch.setattr(rates, "AWAY_SECONDS", 0.0)
    for _ in range(3):
        assert is_let_in(server, text)
        assert recent_keys.is_kept(digest_of(text))


@pytest.mark.usefixtures("kept_long")
def test_one_draw_says_of_all_that_a_transaction_changes(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr("accounts.generations._draw_generation", lambda: drawn.append(1))
    user = make_user()
    keys = [make_key(user)[0] for _ in range(3)]
    drawn.clear()
    with transaction.atomic():
        for key in keys:
            with transaction.atomic():
                services.pause_key(key=key)
    assert drawn == [1]
    drawn.clear()
    user.delete()
    assert drawn == [1]


@pytest.mark.usefixtures("kept_long")
def test_a_change_is_made_while_redis_is_away(server: LiveServer, settings: Any) -> None:
    key, _ = let_in_from_memory(server)
    settings.BROKER_URL = "redis://127.0.0.1:1/0"
    services.revoke_key(key=key)
    key.refresh_from_db()
    assert key.state == "revoked"


async def test_that_statement_uses_the_index_of_digests(pool: db.Pool) -> None:
    def make_many() -> None:
        user = make_user()
        ApiKey.objects.bulk_create(
            ApiKey(user=user, name="k", prefix="p", digest=digest_of(str(i))) for i in range(5_000)
        )
        with orm_connection.cursor() as cursor:
            cursor.execute("ANALYZE accounts_apikey, accounts_user")

    await db.database_step(make_many)
    query, _ = selectors._key_query()
    async with db.connection() as taken:
        cursor = await taken.execute("EXPLAIN " + query, (digest_of("77"),))
        plan = "\n".join(row[0] for row in await cursor.fetchall())
    assert "Index Scan using accounts_apikey_digest" in plan
    assert "Seq Scan on accounts_apikey" not in plan


async def test_the_hot_path_reads_the_same_rows_as_the_orm(pool: db.Pool) -> None:
    limits = {"requests_at_once": 3, "storage_quota_bytes": 2**40}
    key, text = await db.database_step(lambda: make_key(make_user(**limits), token_cap=7))
    found = await selectors.find_key_async(digest_of(text))
    by_orm = await db.database_step(selectors.find_key, digest_of(text))
    assert found is not None
    assert by_orm is not None
    for one in (found, by_orm):
        assert one == key
        assert (one.name, one.token_cap, one.created_at) == (key.name, 7, key.created_at)
        assert (one.user.username, one.user.requests_at_once, one.user.storage_quota_bytes) == (
            key.user.username,
            3,
            2**40,
        )
    assert await selectors.find_key_async(digest_of("nobody")) is None
    assert "password" in found.user.get_deferred_fields()


def is_use_written(key: ApiKey, *, seconds: float = 1) -> bool:
    """Whether the key's last use changes, within `seconds`, from what `key` says."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ApiKey.objects.get(pk=key.pk).last_used_at != key.last_used_at:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(("age", "is_written"), [(None, True), (301, True), (270, False), (0, False)])
def test_the_last_use_is_written_at_most_every_five_minutes(
    server: LiveServer, age: int | None, is_written: bool
) -> None:
    now = timezone.now()
    key, text = make_key(last_used_at=None if age is None else now - timedelta(seconds=age))
    assert is_let_in(server, text)
    # It is written beside the request.
    assert is_use_written(key, seconds=30 if is_written else 1) == is_written
    if is_written:
        key.refresh_from_db()
        assert key.last_used_at is not None
        assert now - timedelta(seconds=1) <= key.last_used_at <= timezone.now() + timedelta(seconds=1)


def test_a_burst_writes_the_last_use_once(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    key, text = make_key()
    spy = Spy(monkeypatch)
    for _ in range(20):
        assert is_let_in(server, text)
    assert is_use_written(key, seconds=30)
    assert len([statement for statement in spy.statements if statement.startswith("UPDATE")]) == 1


def test_a_refused_key_is_not_used(server: LiveServer) -> None:
    key, text = make_key(paused_at=timezone.now())
    assert not is_let_in(server, text)
    assert not is_use_written(key)


async def test_a_lock_on_the_key_delays_no_request(pool: db.Pool, server: LiveServer) -> None:
    key, text = await db.database_step(make_key)
    async with pool.connection() as taken, taken.transaction():
        await taken.execute("SELECT 1 FROM accounts_apikey WHERE id = %s FOR UPDATE", (key.pk,))
        assert await asyncio.to_thread(is_let_in, server, text)
        # The request has its answer, and the write beside it waits for the lock still.
        assert authentication._writing
    assert await db.database_step(is_use_written, key, seconds=30)


async def test_a_write_that_failed_is_tried_again_at_a_later_request(
    pool: db.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, text = await db.database_step(make_key)
    found = await selectors.find_key_async(digest_of(text))
    assert found is not None
    settings = orm_connection.settings_dict
    with proxy_to(int(settings["PORT"])) as proxy:
        await db.close_async_pool()
        monkeypatch.setitem(settings, "PORT", proxy.port)
        await db.fetch_one("SELECT 1")
        proxy.cut()
        authentication._note_use(found)
        await asyncio.gather(*authentication._writing)
        assert not await db.database_step(is_use_written, key, seconds=0.1)
        proxy.mend()
        await db.fetch_one("SELECT 1")
        authentication._note_use(found)
        await asyncio.gather(*authentication._writing)
        assert await db.database_step(is_use_written, key, seconds=30)
        monkeypatch.undo()
        await db.close_async_pool()
