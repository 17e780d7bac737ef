"""The tables of a plain way: Budget, Holds and ledger."""

import psycopg

TABLES = """
CREATE SCHEMA plain_way;
CREATE TABLE plain_way.budget (
    id int PRIMARY KEY, used bigint NOT NULL, held bigint NOT NULL, ceiling bigint NOT NULL,
    CHECK (used + held <= ceiling));
CREATE TABLE plain_way.hold (
    id uuid PRIMARY KEY, budget_id int NOT NULL REFERENCES plain_way.budget, tokens bigint NOT NULL,
    taken_at timestamptz NOT NULL DEFAULT now(), ended_at timestamptz);
CREATE TABLE plain_way.entry (
    id bigserial PRIMARY KEY, hold_id uuid NOT NULL UNIQUE REFERENCES plain_way.hold, tokens bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now());
INSERT INTO plain_way.budget VALUES (1, 0, 0, 1000000000000);
"""


def make_tables(database_url: str) -> None:
    """Make the Budget of everybody."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(TABLES)
