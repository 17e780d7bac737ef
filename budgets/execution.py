"""Runs a step of the money, written once as a generator of statements, on Django's connection or on the async pool.

A step yields the statements that are one transaction and is sent the first row of the last of them, or None.
"""

import asyncio
from collections.abc import Generator, Mapping
from typing import Any, Final, LiteralString

import psycopg
from django.db import connection, transaction

from acsinfra.core import db

type Row = tuple[Any, ...]
type Statement = tuple[LiteralString, Mapping[str, Any]]
type Step[T] = Generator[tuple[Statement, ...], Row | None, T]

# A database that restarts leaves dead connections; statements that meet at one work may, very rarely, deadlock.
TRIES: Final = 3


def run[T](step: Step[T]) -> T:
    """Run `step` on this thread's connection, inside the caller's transaction where there is one."""
    row: Row | None = None
    while True:
        try:
            statements = step.send(row) if row is not None else next(step)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        row = _execute(statements)


def _execute(statements: tuple[Statement, ...]) -> Row | None:
    if len(statements) == 1:
        return _first_row(statements[0])
    with transaction.atomic():
        rows = [_first_row(statement) for statement in statements]
    return rows[-1]


def _first_row(statement: Statement) -> Row | None:
    with connection.cursor() as cursor:
        cursor.execute(*statement)
        return cursor.fetchone() if cursor.description else None


async def run_async[T](step: Step[T]) -> T:
    """Run `step`, each transaction on a pooled connection that goes back at once.

    A transaction that lost its connection is sent again: each of ours is safe to happen twice.
    """
    row: Row | None = None
    while True:
        try:
            statements = step.send(row) if row is not None else next(step)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        row = await _execute_async(statements)


async def _execute_async(statements: tuple[Statement, ...]) -> Row | None:
    for is_last in (False,) * (TRIES - 1) + (True,):
        pool = await db.async_pool()
        async with pool.connection() as taken:
            try:
                return await _first_row_of_last(taken, statements)
            except psycopg.errors.DeadlockDetected:
                if is_last:
                    raise
            except psycopg.OperationalError:
                if is_last or not taken.broken:
                    raise
        await asyncio.sleep(0)
        await pool.check()
    raise AssertionError("unreachable")


async def _first_row_of_last(taken: psycopg.AsyncConnection[Row], statements: tuple[Statement, ...]) -> Row | None:
    if len(statements) == 1:
        cursor = await taken.execute(*statements[0])
    else:
        # One round trip. The transaction is begun and ended by statements: what its end refuses (a row that is
        # referred to and gone) is then the answer to one of them, where libpq (18) breaks off at a pipeline's own end.
        async with taken.pipeline():
            await taken.execute("BEGIN")
            for statement in statements:
                cursor = await taken.execute(*statement)
            await taken.execute("COMMIT")
    return await cursor.fetchone() if cursor.description else None
