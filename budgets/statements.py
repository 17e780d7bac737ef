"""The SQL of the money: each step one statement, so that it happens whole or not at all.

All lock in one order, Budget before KeyUse, and so cannot wait for each other in a circle. They run on autocommit
connections as inside a caller's transaction, at PostgreSQL's default isolation (READ COMMITTED): a row that another
changed meanwhile is looked at again, as it is now, once its lock is there.
"""

from typing import Final, LiteralString

HOLD_COLUMNS: Final = (
    "id",
    "budget_id",
    "key_use_id",
    "tokens",
    "state",
    "charged",
    "work_kind",
    "work_id",
    "model",
    "holder",
    "taken_at",
    "expires_at",
    "ended_at",
)
_COLUMNS: Final[LiteralString] = (
    "id, budget_id, key_use_id, tokens, state, charged, work_kind, work_id, model, holder, taken_at,"
    " expires_at, ended_at"
)

# `room` locks the Budget (and the key's row) and looks whether the tokens fit. A work that has its Hold changes
# nothing: the rows of others are not locked for it, and two takes for the same work meet at the unique index.
_TAKE: Final[tuple[LiteralString, LiteralString]] = (
    """
WITH room AS (
    SELECT b.id AS budget_id, """,
    f"""
       AND NOT EXISTS (SELECT FROM budgets_hold w WHERE w.work_kind = %(work_kind)s AND w.work_id = %(work_id)s
                                                    AND w.state <> 'released')
       FOR NO KEY UPDATE
), taken AS (
    INSERT INTO budgets_hold ({_COLUMNS})
    SELECT %(id)s::uuid, budget_id, key_use_id, %(tokens)s::bigint, 'live', NULL, %(work_kind)s, %(work_id)s,
           %(model)s, %(holder)s, %(now)s::timestamptz, %(expires_at)s::timestamptz, NULL
      FROM room
        ON CONFLICT (work_kind, work_id) WHERE state <> 'released' DO NOTHING
    RETURNING {_COLUMNS}
), in_budget AS (
    UPDATE budgets_budget b SET held = b.held + taken.tokens, ceiling = b.token_limit
      FROM taken WHERE b.id = taken.budget_id
    RETURNING b.id
), in_key_use AS (
    UPDATE budgets_keyuse k SET held = k.held + taken.tokens, ceiling = k.cap
      FROM taken, in_budget WHERE k.id = taken.key_use_id
    RETURNING k.id
)
SELECT {_COLUMNS} FROM taken
""",  # noqa: S608 (of constants)
)
_FITS_BUDGET: Final[LiteralString] = """
     WHERE b.user_id = %(user)s AND b.month = %(month)s::date
       AND %(tokens)s::bigint <= b.token_limit - b.used - b.held"""
_IN_BUDGET: Final[LiteralString] = f" FROM budgets_budget b{_FITS_BUDGET}"
_IN_BUDGET_AND_KEY: Final[LiteralString] = (
    " FROM budgets_budget b JOIN budgets_keyuse k ON k.budget_id = b.id AND k.api_key_id = %(api_key)s"
    + _FITS_BUDGET
    + " AND (k.cap IS NULL OR %(tokens)s::bigint <= k.cap - k.used - k.held)"
)
TAKE: Final[LiteralString] = f"{_TAKE[0]}NULL::bigint AS key_use_id{_IN_BUDGET}{_TAKE[1]}"
TAKE_WITH_KEY: Final[LiteralString] = f"{_TAKE[0]}k.id AS key_use_id{_IN_BUDGET_AND_KEY}{_TAKE[1]}"

# A row where a take would find room right now: part of a statement that takes nothing.
ROOM: Final[LiteralString] = f"SELECT b.id{_IN_BUDGET}"
ROOM_WITH_KEY: Final[LiteralString] = f"SELECT b.id{_IN_BUDGET_AND_KEY}"

# What stands in the way of a take: the rows that are there, their figures, and the work's Hold if it has one.
LOOK: Final[LiteralString] = """
SELECT b.token_limit, b.used, b.held, k.id IS NOT NULL, k.cap, k.used, k.held,
       h.id, h.budget_id, h.key_use_id, h.tokens, h.state, h.charged, h.work_kind, h.work_id, h.model, h.holder,
       h.taken_at, h.expires_at, h.ended_at, of_hold.user_id
  FROM (SELECT) AS one
  LEFT JOIN budgets_budget b ON b.user_id = %(user)s AND b.month = %(month)s::date
  LEFT JOIN budgets_keyuse k ON k.budget_id = b.id AND k.api_key_id = %(api_key)s::bigint
  LEFT JOIN budgets_hold h ON h.work_kind = %(work_kind)s AND h.work_id = %(work_id)s AND h.state <> 'released'
  LEFT JOIN budgets_budget of_hold ON of_hold.id = h.budget_id
"""

# The month's rows. The locks come first, in statements of their own: a limit or cap that an operator changes right now
# is either seen here, or its change finds the new row.
LOCK_USER: Final[LiteralString] = "SELECT id FROM accounts_user WHERE id = %(user)s FOR SHARE"
LOCK_KEY: Final[LiteralString] = "SELECT id FROM accounts_apikey WHERE id = %(api_key)s FOR SHARE"
OPEN_BUDGET: Final[LiteralString] = """
INSERT INTO budgets_budget (user_id, month, token_limit, ceiling, used, held)
SELECT u.id, %(month)s::date, l.tokens, l.tokens, 0, 0
  FROM accounts_user u
  LEFT JOIN budgets_monthlylimit o ON o.user_id = u.id
 CROSS JOIN LATERAL (SELECT coalesce(o.monthly_tokens, %(default_limit)s::bigint) AS tokens) l
 WHERE u.id = %(user)s
    ON CONFLICT (user_id, month) DO NOTHING
"""
OPEN_KEY_USE: Final[LiteralString] = """
INSERT INTO budgets_keyuse (budget_id, api_key_id, prefix, cap, ceiling, used, held)
SELECT b.id, a.id, a.prefix, a.token_cap, a.token_cap, 0, 0
  FROM accounts_apikey a JOIN budgets_budget b ON b.user_id = a.user_id AND b.month = %(month)s::date
 WHERE a.id = %(api_key)s AND a.user_id = %(user)s
    ON CONFLICT (budget_id, api_key_id) DO NOTHING
"""

# A Hold without `ended_at` is live, by its CHECK. Named by its state, the planner may scan the index of all live Holds.
SETTLE: Final[LiteralString] = """
WITH ended AS (
    UPDATE budgets_hold
       SET state = 'settled', charged = least(tokens, %(tokens)s::bigint), ended_at = %(now)s::timestamptz
     WHERE id = %(id)s::uuid AND ended_at IS NULL
    RETURNING id, budget_id, key_use_id, tokens, charged, work_kind, work_id, model
), in_budget AS (
    UPDATE budgets_budget b SET held = b.held - ended.tokens, used = b.used + ended.charged
      FROM ended WHERE b.id = ended.budget_id
    RETURNING b.id
), in_key_use AS (
    UPDATE budgets_keyuse k SET held = k.held - ended.tokens, used = k.used + ended.charged
      FROM ended, in_budget WHERE k.id = ended.key_use_id
    RETURNING k.id
), in_ledger AS (
    INSERT INTO budgets_ledgerentry (hold_id, budget_id, tokens, work_kind, work_id, model, charged_at)
    SELECT id, budget_id, charged, work_kind, work_id, model, %(now)s::timestamptz FROM ended
)
SELECT tokens, charged FROM ended
"""

RELEASE: Final[LiteralString] = """
WITH ended AS (
    UPDATE budgets_hold SET state = 'released', ended_at = %(now)s::timestamptz
     WHERE id = %(id)s::uuid AND ended_at IS NULL
    RETURNING budget_id, key_use_id, tokens
), in_budget AS (
    UPDATE budgets_budget b SET held = b.held - ended.tokens
      FROM ended WHERE b.id = ended.budget_id
    RETURNING b.id
), in_key_use AS (
    UPDATE budgets_keyuse k SET held = k.held - ended.tokens
      FROM ended, in_budget WHERE k.id = ended.key_use_id
    RETURNING k.id
)
SELECT tokens, 0 FROM ended
"""

STATE: Final[LiteralString] = "SELECT state, charged FROM budgets_hold WHERE id = %(id)s::uuid"

# A limit's change: the ceiling stays above what is used and held already.
APPLY_LIMIT: Final[LiteralString] = """
UPDATE budgets_budget b SET token_limit = l.tokens, ceiling = greatest(l.tokens, b.used + b.held)
  FROM accounts_user u
  LEFT JOIN budgets_monthlylimit o ON o.user_id = u.id
 CROSS JOIN LATERAL (SELECT coalesce(o.monthly_tokens, %(default_limit)s::bigint) AS tokens) l
 WHERE u.id = %(user)s AND b.user_id = u.id AND b.month = %(month)s::date AND b.token_limit <> l.tokens
RETURNING b.id
"""
APPLY_CAP: Final[LiteralString] = """
UPDATE budgets_keyuse k SET cap = a.token_cap,
       ceiling = CASE WHEN a.token_cap IS NOT NULL THEN greatest(a.token_cap, k.used + k.held) END
  FROM accounts_apikey a, budgets_budget b
 WHERE a.id = %(api_key)s AND k.api_key_id = a.id AND b.id = k.budget_id AND b.month = %(month)s::date
   AND k.cap IS DISTINCT FROM a.token_cap
RETURNING k.id
"""
OUTDATED_LIMITS: Final[LiteralString] = """
SELECT b.user_id FROM budgets_budget b LEFT JOIN budgets_monthlylimit o ON o.user_id = b.user_id
 WHERE b.month = %(month)s::date AND b.token_limit <> coalesce(o.monthly_tokens, %(default_limit)s::bigint)
"""
OUTDATED_CAPS: Final[LiteralString] = """
SELECT k.api_key_id FROM budgets_keyuse k
  JOIN budgets_budget b ON b.id = k.budget_id JOIN accounts_apikey a ON a.id = k.api_key_id
 WHERE b.month = %(month)s::date AND k.cap IS DISTINCT FROM a.token_cap
"""
