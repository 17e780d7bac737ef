"""Users, keys and work for the tests of the money."""

import itertools
import os
import secrets
import subprocess
import sys

from django.db import connection

from accounts.models import ApiKey, User
from accounts.services import create_key, create_user
from budgets.limits import set_monthly_tokens
from budgets.models import WorkKind
from budgets.services import WorkRef

_numbers = itertools.count()


def make_user(monthly_tokens: int | None = None) -> User:
    """Make a User, with a limit of their own where one is given."""
    name = f"user-{secrets.token_hex(6)}"
    user = create_user(username=name, email=f"{name}@example.org")
    if monthly_tokens is not None:
        set_monthly_tokens(user=user, monthly_tokens=monthly_tokens)
    return user


def make_key(user: User, cap: int | None = None) -> ApiKey:
    return create_key(user=user, name="tests", token_cap=cap)[0]


def new_work(kind: WorkKind = WorkKind.COMPLETION, holder: str = "") -> WorkRef:
    """Return work that no other Hold names."""
    return WorkRef(kind, f"req_{next(_numbers)}_{secrets.token_hex(8)}", holder)


def start_child(what: str, key: ApiKey, *, tokens: int, n_at_once: int = 1) -> subprocess.Popen[str]:
    """Start `tests.budgets.child` on this test's database, and wait until it is ready."""
    database = connection.settings_dict
    url = "postgres://{USER}:{PASSWORD}@{HOST}:{PORT}/{NAME}".format_map(database)
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.budgets.child", what, str(key.pk), str(tokens), str(n_at_once)],
        env={**os.environ, "DATABASE_URL": url},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child
