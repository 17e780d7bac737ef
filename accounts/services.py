"""What changes Users and keys."""

import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import transaction
from django.utils import timezone

from accounts.keys import SHOWN_CHARACTERS, digest_of, new_key_text
from accounts.models import ApiKey, User

INT64_MAX = 2**63 - 1


class ImportFault(Exception):
    """Lines of an import that cannot be used; nothing was imported. `faults` are sentences, each with its line."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@dataclass(frozen=True)
class ImportCount:
    """What an import did: keys made, keys that were there already, Users made."""

    made: int
    present: int
    users_made: int


@transaction.atomic
def create_user(*, username: str, email: str, password: str | None = None, is_staff: bool = False) -> User:
    """A new User, who cannot sign in without a password. Raises ValidationError for a name or address in use."""
    user = User(username=username, email=email, is_staff=is_staff)
    user.set_password(password)
    user.full_clean(exclude=["password"])
    user.save()
    return user


def set_active(*, user: User, is_active: bool) -> bool:
    """Suspend `user`, or end that; says whether it changed something.

    Neither a session nor a key of a User who is not active is taken; nothing else is to do.
    """
    changed = User.objects.filter(pk=user.pk, is_active=not is_active).update(is_active=is_active)
    user.is_active = is_active
    return changed > 0


def create_key(
    *, user: User, name: str, token_cap: int | None = None, expires_at: datetime | None = None
) -> tuple[ApiKey, str]:
    """A new key of `user` and its text, which nothing can show again. Raises ValidationError."""
    text = new_key_text()
    key = ApiKey(
        user=user,
        name=name,
        prefix=text[:SHOWN_CHARACTERS],
        digest=digest_of(text),
        token_cap=token_cap,
        expires_at=expires_at,
    )
    key.full_clean()
    key.save()
    return key, text


def update_key(*, key: ApiKey, name: str, token_cap: int | None, expires_at: datetime | None) -> None:
    """Give the key another name, cap and end. A cap counts from this month on. Raises ValidationError."""
    key.name, key.token_cap, key.expires_at = name, token_cap, expires_at
    key.full_clean()
    key.save(update_fields=["name", "token_cap", "expires_at"])


def pause_key(*, key: ApiKey) -> None:
    """Refuse the key until it is resumed; a paused key keeps its first time of pause."""
    ApiKey.objects.filter(pk=key.pk, paused_at=None).update(paused_at=timezone.now())
    key.refresh_from_db()


def resume_key(*, key: ApiKey) -> None:
    """Take a paused key again. A revoked one stays revoked."""
    ApiKey.objects.filter(pk=key.pk).update(paused_at=None)
    key.refresh_from_db()


def revoke_key(*, key: ApiKey) -> None:
    """Refuse the key for ever."""
    ApiKey.objects.filter(pk=key.pk, revoked_at=None).update(revoked_at=timezone.now())
    key.refresh_from_db()


@transaction.atomic
def import_keys(*, lines: Iterable[str]) -> ImportCount:
    """Take over keys of the old platform from JSON lines of `sha256`, `prefix`, `user_email`, `name` and `cap`.

    All lines or none: raises ImportFault with every fault. A key that is there already is left as it is, so that an
    import may run twice; a User is made for an address that has none, and cannot sign in before a password is set.
    """
    faults: list[str] = []
    parsed: dict[bytes, _ImportedKey] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            imported = _read_line(line)
        except ValueError as error:
            faults.append(f"line {number}: {error}")
            continue
        if imported.digest in parsed:
            faults.append(f"line {number}: the same sha256 stands on a line above.")
        parsed[imported.digest] = imported

    present = {bytes(key.digest): key for key in ApiKey.objects.select_related("user").filter(digest__in=parsed)}
    for digest, key in present.items():
        if key.user.email.lower() != parsed[digest].email:
            faults.append(f"key {parsed[digest].prefix}…: it is here already, and belongs to another User.")
    if faults:
        raise ImportFault(faults)

    users: dict[str, User] = {}
    users_made = 0
    for digest, imported in parsed.items():
        if digest in present:
            continue
        if imported.email not in users:
            found = User.objects.filter(email__iexact=imported.email).first()
            users_made += found is None
            users[imported.email] = found or create_user(username=_free_username(imported.email), email=imported.email)
        ApiKey.objects.create(
            user=users[imported.email],
            name=imported.name,
            prefix=imported.prefix,
            digest=digest,
            token_cap=imported.cap,
        )
    return ImportCount(made=len(parsed) - len(present), present=len(present), users_made=users_made)


def _free_username(email: str) -> str:
    """The address as a username: with `_` for what a username may not hold, and a number where it is taken."""
    name = re.sub(r"[^\w.@+-]", "_", email, flags=re.ASCII)[:140]
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return next(one for one in itertools.chain([name], numbered) if not User.objects.filter(username=one).exists())


@dataclass(frozen=True)
class _ImportedKey:
    digest: bytes
    prefix: str
    email: str
    name: str
    cap: int | None


_FIELDS = {"sha256", "prefix", "user_email", "name", "cap"}


def _read_line(line: str) -> _ImportedKey:
    """One line of an import; raises ValueError with what is wrong with it."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON.") from None
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object.")
    if unknown := sorted(row.keys() - _FIELDS):
        raise ValueError(f"unknown field {unknown[0]!r}.")
    if missing := sorted(_FIELDS - {"cap"} - row.keys()):
        raise ValueError(f"{missing[0]} is missing.")
    sha256, cap = row["sha256"], row.get("cap")
    if not isinstance(sha256, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", sha256, re.ASCII):
        raise ValueError("sha256 must be 64 hex digits.")
    if cap is not None and (type(cap) is not int or not 0 <= cap <= INT64_MAX):
        raise ValueError("cap must be a whole number of tokens, or null.")
    prefix, name = _text(row, "prefix", 20), _text(row, "name", 100)
    email = _text(row, "user_email", 150).lower()
    try:
        validate_email(email)
    except ValidationError:
        raise ValueError("user_email is no e-mail address.") from None
    return _ImportedKey(digest=bytes.fromhex(sha256), prefix=prefix, email=email, name=name, cap=cap)


def _text(row: dict[str, Any], field: str, max_length: int) -> str:
    value = row[field]
    if not isinstance(value, str) or not value.strip() or len(value) > max_length or not value.isprintable():
        raise ValueError(f"{field} must be a text of 1 to {max_length} printable characters.")
    return value
