"""The tables of the least way: Budget, Holds and ledger."""

import psycopg

TABLES = """
CREATE SCHEMA least_way;
CREATE TABLE least_way.budget (
    id int PRIMARY KEY, used bigint NOT NULL, held bigint NOT NULL, ceiling bigint NOT NULL,
    CHECK (used + held <= ceiling));
CREATE TABLE least_way.hold (
    id uuid PRIMARY KEY, budget_id int NOT NULL REFERENCES least_way.budget, tokens bigint NOT NULL,
    taken_at timestamptz NOT NULL DEFAULT now(), ended_at timestamptz);
CREATE TABLE least_way.entry (
    id bigserial PRIMARY KEY, hold_id uuid NOT NULL UNIQUE REFERENCES least_way.hold, tokens bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now());
INSERT INTO least_way.budget VALUES (1, 0, 0, 1000000000000);
"""


def make_tables(database_url: str) -> None:
    """Make the Budget of everybody."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(TABLES)
