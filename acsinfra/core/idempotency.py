"""Idempotency-Keys: what a request asks to be done once, however often it is sent.

A key is a row of its User, whichever of their API keys sent it. Of a Job or Harvest job it names the work, by
`bind_work` in the transaction that makes that work. Of a Completion it is first in progress, held by the process that
answers (`begin_work`), and then holds the answer (`record_answer`), unless the request was refused before any work
(`forget_work`). One unique index decides between two requests of the same instant, on whatever server.
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, LiteralString

import psycopg
from django.conf import settings
from django.db import connection
from psycopg.types.json import Jsonb
from rest_framework.request import Request

from acsinfra.core.db import Row, fetch_one
from acsinfra.core.errors import ApiError, ErrorCode, invalid, invalid_api_key
from acsinfra.core.storage import get_storage

HEADER: Final = "Idempotency-Key"
MAX_KEY_CHARACTERS: Final = 255
# Larger answers are kept in storage, below FILES/<day>/, so that a sweep finds also those whose row never came.
INLINE_BYTES: Final = 1024 * 1024
FILES: Final = "idempotency"
SWEEP_BATCH: Final = 1000
# A row may be swept while its key is asked for: then it is looked for again.
TRIES: Final = 10


@dataclass(frozen=True)
class IdempotentRequest:
    """A request that is to be done once. `fingerprint` is the SHA-256 of its route and its JSON value."""

    user_id: int
    key: str
    fingerprint: bytes


@dataclass(frozen=True)
class RecordedAnswer:
    """An answer as it was first given: its status, the headers that belong to it, and its bytes.

    `file` is the storage key of a body that is too large for its row; `body` is empty then.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    file: str = ""


@dataclass(frozen=True)
class InProgress:
    """The same request is being answered, by process `holder` for its request `reference`."""

    holder: str
    reference: str


@dataclass(frozen=True)
class SweptKeys:
    """What a sweep did with keys whose holder died: `answered` with an error, or `freed` because no work was done."""

    answered: int = 0
    freed: int = 0


# Reading a request


def read_idempotency_key(request: Request, *, required: bool) -> str | None:
    """The request's Idempotency-Key, None where it has none. Raises `400 invalid_request`, param `Idempotency-Key`."""
    sent = request.headers.get(HEADER)
    if sent is None:
        if required:
            raise invalid(f"This route needs the header {HEADER}, so that a retry does the work once.", param=HEADER)
        return None
    # ASGI gives each byte as a character, and clients send UTF-8.
    try:
        key = sent.encode("latin-1").decode("utf-8")
    except UnicodeError:
        key = sent
    if not 1 <= len(key) <= MAX_KEY_CHARACTERS or not key.isprintable():
        raise invalid(f"{HEADER} must be 1 to {MAX_KEY_CHARACTERS} printable characters.", param=HEADER)
    return key


def idempotent_request(*, user_id: int, key: str, route: str, body: Mapping[str, Any]) -> IdempotentRequest:
    """The request that `key` stands for. `route` is method and path, `body` the parsed JSON.

    Takes about 10 ms for a MiB: run it in a thread for a large body.
    """
    # ASCII, so that lone surrogates, which the fields refuse only later, have a form too.
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    fingerprint = hashlib.sha256(f"{route}\n{canonical}".encode("ascii")).digest()
    return IdempotentRequest(user_id=user_id, key=key, fingerprint=fingerprint)


def conflict() -> ApiError:
    """`409 idempotency_conflict`, which clients are told not to retry."""
    return ApiError(
        ErrorCode.IDEMPOTENCY_CONFLICT,
        f"This {HEADER} was used for another request within the last {_kept_in_words()}. Use another key.",
        param=HEADER,
        headers={"x-should-retry": "false"},
    )


def in_progress() -> ApiError:
    """`409 idempotency_in_progress`."""
    return ApiError(
        ErrorCode.IDEMPOTENCY_IN_PROGRESS,
        f"A request with this {HEADER} is being answered. Ask again for its answer.",
        param=HEADER,
        headers={"Retry-After": "1"},
    )


def _kept_in_words() -> str:
    hours = settings.IDEMPOTENCY_KEPT.total_seconds() / 3600
    return f"{hours:g} hours"


# The rows

_COLUMNS: Final[LiteralString] = "fingerprint, work_id, holder, reference, status, headers, body, file"
_FIND: Final[LiteralString] = f"""
SELECT {_COLUMNS} FROM acsinfra_idempotencykey
 WHERE user_id = %(user)s AND key = %(key)s AND created_at > now() - %(kept)s::interval
"""  # noqa: S608 (of constants)
_NEW_ROW: Final[LiteralString] = (
    "%(user)s, %(key)s, %(fingerprint)s, now(), %(work)s, %(holder)s, %(reference)s, NULL, '{}', NULL, ''"
)
# A second transaction waits here for the first one's commit. A row past its time is as if it were not there.
_CLAIM_BY: Final[tuple[LiteralString, LiteralString]] = (
    """
INSERT INTO acsinfra_idempotencykey AS held
       (user_id, key, fingerprint, created_at, work_id, holder, reference, status, headers, body, file)
""",
    """
    ON CONFLICT (user_id, key) DO UPDATE
   SET fingerprint = excluded.fingerprint, created_at = excluded.created_at, work_id = excluded.work_id,
       holder = excluded.holder, reference = excluded.reference, status = NULL, headers = '{}', body = NULL, file = ''
 WHERE held.created_at <= now() - %(kept)s::interval
RETURNING id
""",
)
_CLAIM: Final[LiteralString] = f"{_CLAIM_BY[0]}VALUES ({_NEW_ROW}){_CLAIM_BY[1]}"
_OWN: Final[LiteralString] = (
    " WHERE user_id = %(user)s AND key = %(key)s AND reference = %(reference)s AND holder <> '' AND status IS NULL"
    " RETURNING id"
)
_SET_ANSWER: Final[LiteralString] = (
    "UPDATE acsinfra_idempotencykey SET status = %(status)s, headers = %(headers)s, body = %(body)s, file = %(file)s"
)
_RECORD: Final[LiteralString] = _SET_ANSWER + _OWN
_FORGET: Final[LiteralString] = "DELETE FROM acsinfra_idempotencykey" + _OWN  # noqa: S608 (of constants)


@dataclass(frozen=True)
class _Found:
    """A key's row, as far as it says what became of the request."""

    fingerprint: bytes
    work_id: uuid.UUID | None
    holder: str
    reference: str
    status: int | None
    headers: Mapping[str, str]
    body: bytes | None
    file: str


def _found(row: Row | None, request: IdempotentRequest) -> _Found | None:
    """The row, which is of the same request. Raises `409 idempotency_conflict`."""
    if row is None:
        return None
    fingerprint, work_id, holder, reference, status, headers, body, file = row
    if bytes(fingerprint) != request.fingerprint:
        raise conflict()
    if isinstance(headers, str):  # Django's connection leaves JSON as text
        headers = json.loads(headers)
    return _Found(request.fingerprint, work_id, holder, reference, status, headers, body and bytes(body), file)


def _values(request: IdempotentRequest, **more: Any) -> dict[str, Any]:
    return {"user": request.user_id, "key": request.key, "kept": settings.IDEMPOTENCY_KEPT, **more}


def _claim_values(
    request: IdempotentRequest, *, work_id: uuid.UUID | None = None, holder: str = "", reference: str = ""
) -> dict[str, Any]:
    return _values(request, fingerprint=request.fingerprint, work=work_id, holder=holder, reference=reference)


def _first_row(query: LiteralString, values: Mapping[str, Any]) -> Row | None:
    with connection.cursor() as cursor:
        cursor.execute(query, values)
        row: Row | None = cursor.fetchone()
        return row


# Work that is a row: Jobs and Harvest jobs


def find_work(request: IdempotentRequest) -> uuid.UUID | None:
    """The id of the Job or Harvest job that the key made; None for an unused key.

    Raises `409 idempotency_conflict`: the key was used for another request.
    """
    return work_in(_first_row(*find_statement(request)), request)


async def find_work_async(request: IdempotentRequest) -> uuid.UUID | None:
    """`find_work` from an async view: one statement on the async pool."""
    return work_in(await fetch_one(*find_statement(request)), request)


def find_statement(request: IdempotentRequest) -> tuple[LiteralString, dict[str, Any]]:
    """The statement that `find_work` sends; `work_in` reads its row."""
    return _FIND, _values(request)


def work_in(row: Row | None, request: IdempotentRequest) -> uuid.UUID | None:
    """What `find_work` returns, and raises, by the first row of its statement."""
    found = _found(row, request)
    return None if found is None else found.work_id


def bind_statement(source: LiteralString) -> LiteralString:
    """A part of the statement that makes the work: binds the key to it if `source` (of the same WITH) has its one row.

    It gives a row where the key is bound, and none where another has it. Takes the values of `bind_values`.
    """
    return f"{_CLAIM_BY[0]}SELECT {_NEW_ROW} FROM {source}{_CLAIM_BY[1]}"  # noqa: S608 (of constants)


def bind_values(request: IdempotentRequest, work_id: uuid.UUID) -> dict[str, Any]:
    """The values `user`, `key`, `fingerprint`, `kept`, `work`, `holder` and `reference` of `bind_statement`."""
    return _claim_values(request, work_id=work_id)


def bind_work(request: IdempotentRequest, work_id: uuid.UUID) -> uuid.UUID:
    """Bind the key to `work_id`, inside the transaction that makes that work.

    Returns `work_id`, or the id that another transaction bound first: the caller then rolls back and answers with that
    one. A second at the same instant waits here for the first's end. Raises `409 idempotency_conflict`.
    """
    for _ in range(TRIES):
        if _first_row(_CLAIM, _claim_values(request, work_id=work_id)) is not None:
            return work_id
        found = _found(_first_row(_FIND, _values(request)), request)
        if found is not None and found.work_id is not None:
            return found.work_id
    raise in_progress()


def free_work(*, user_id: int, work_id: uuid.UUID) -> None:
    """The work was refused after all, before it began: a retry may try again. In the transaction that writes so."""
    with connection.cursor() as cursor:
        cursor.execute(
            "DELETE FROM acsinfra_idempotencykey WHERE user_id = %(user)s AND work_id = %(work)s",
            {"user": user_id, "work": work_id},
        )


# Work that is an answer: Completions


async def find_answer(request: IdempotentRequest) -> RecordedAnswer | InProgress | None:
    """What became of the request so far; None for an unused key. Raises `409 idempotency_conflict`."""
    return _outcome(_found(await fetch_one(_FIND, _values(request)), request))


async def begin_work(request: IdempotentRequest, *, holder: str, reference: str) -> RecordedAnswer | InProgress | None:
    """Take the key for process `holder`, which answers it as its request `reference`; None: it is ours.

    Otherwise what another made of it, or that it is still at it. Whoever gets None ends with `record_answer` or
    `forget_work`. Raises `409 idempotency_conflict`, and ApiError `401` for a User who has been deleted meanwhile.
    """
    values = _claim_values(request, holder=holder, reference=reference)
    for _ in range(TRIES):
        try:
            if await fetch_one(_CLAIM, values) is not None:
                return None
        except psycopg.errors.ForeignKeyViolation:
            raise invalid_api_key() from None
        found = _found(await fetch_one(_FIND, _values(request)), request)
        # Sent twice over a lost connection, the first may have arrived.
        if found is not None and found.reference == reference and found.status is None:
            return None
        if (outcome := _outcome(found)) is not None:
            return outcome
    return InProgress(holder="", reference="")


async def record_answer(request: IdempotentRequest, *, reference: str, answer: RecordedAnswer) -> None:
    """Keep the answer for every retry, unless a sweep has ended the key meanwhile."""
    values = _values(request, reference=reference) | _answer_values(answer)
    await fetch_one(_RECORD, values)


async def forget_work(request: IdempotentRequest, *, reference: str) -> None:
    """The request was refused before any work: the key is as if it had never been sent."""
    await fetch_one(_FORGET, _values(request, reference=reference))


def answer_file() -> str:
    """A new storage key for an answer of more than INLINE_BYTES."""
    return f"{FILES}/{datetime.now(UTC).date().isoformat()}/{uuid.uuid4().hex}"


def _answer_values(answer: RecordedAnswer) -> dict[str, Any]:
    return {
        "status": answer.status,
        "headers": Jsonb(dict(answer.headers)),
        "body": None if answer.file else answer.body,
        "file": answer.file,
    }


def _outcome(found: _Found | None) -> RecordedAnswer | InProgress | None:
    if found is None:
        return None
    if found.status is None:
        return InProgress(found.holder, found.reference)
    return RecordedAnswer(found.status, found.headers, found.body or b"", found.file)


# Sweeps

_ABANDONED: Final[LiteralString] = """
SELECT id, holder, reference FROM acsinfra_idempotencykey
 WHERE status IS NULL AND holder <> '' AND id > %(after)s ORDER BY id LIMIT %(at_most)s
"""
_OF_DEAD: Final[LiteralString] = " WHERE id = %(id)s AND reference = %(reference)s AND status IS NULL RETURNING id"
_ANSWER_FOR_DEAD: Final[LiteralString] = _SET_ANSWER + _OF_DEAD
_FREE_OF_DEAD: Final[LiteralString] = "DELETE FROM acsinfra_idempotencykey" + _OF_DEAD  # noqa: S608 (of constants)
_DELETE_OLD: Final[LiteralString] = """
DELETE FROM acsinfra_idempotencykey WHERE id IN (
    SELECT id FROM acsinfra_idempotencykey WHERE created_at <= now() - %(kept)s::interval
     ORDER BY created_at LIMIT %(at_most)s FOR UPDATE SKIP LOCKED)
RETURNING id
"""


def end_abandoned_keys(
    *,
    find_living: Callable[[Collection[str]], Collection[str]],
    outcome: Callable[[str], RecordedAnswer | InProgress | None],
) -> SweptKeys:
    """End the keys in progress whose holder died, so that none stays in progress for ever.

    `find_living` gets holders and returns those that live. `outcome` says what became of the request of a `reference`:
    the answer that its retries get, None where no work was done and the key is free again, or InProgress to look again
    at the next sweep. Safe to run twice at once.
    """
    answered = freed = after = 0
    while True:
        with connection.cursor() as cursor:
            cursor.execute(_ABANDONED, {"after": after, "at_most": SWEEP_BATCH})
            rows = cursor.fetchall()
        if not rows:
            return SweptKeys(answered=answered, freed=freed)
        after = rows[-1][0]
        living = frozenset(find_living({holder for _, holder, _ in rows}))
        for pk, holder, reference in rows:
            if holder in living:
                continue
            answer = outcome(reference)
            row = {"id": pk, "reference": reference}
            if isinstance(answer, RecordedAnswer):
                answered += _first_row(_ANSWER_FOR_DEAD, row | _answer_values(answer)) is not None
            elif answer is None:
                freed += _first_row(_FREE_OF_DEAD, row) is not None


def delete_old_keys() -> int:
    """Delete the keys past their time, and return how many. Safe to run twice at once."""
    deleted = 0
    values: dict[str, Any] = {"kept": settings.IDEMPOTENCY_KEPT, "at_most": SWEEP_BATCH}
    while True:
        with connection.cursor() as cursor:
            cursor.execute(_DELETE_OLD, values)
            batch = len(cursor.fetchall())
        deleted += batch
        if batch < SWEEP_BATCH:
            return deleted


def delete_old_files(*, today: date | None = None) -> None:
    """Delete the answers in storage past their time, those included whose row never came. Raises StorageError."""
    storage = get_storage()
    oldest = (today or datetime.now(UTC).date()) - settings.IDEMPOTENCY_KEPT - timedelta(days=1)
    for day in sorted({key.split("/")[1] for key in storage.keys(FILES)}):
        if day < oldest.isoformat():
            storage.delete_prefix(f"{FILES}/{day}")
