"""What the commands on keys share."""

from argparse import ArgumentParser, ArgumentTypeError
from datetime import UTC, datetime, timedelta

from django.core.management.base import CommandError
from django.db.models import Q
from django.utils import timezone

from accounts.keys import digest_of
from accounts.models import ApiKey, User


def add_key_argument(parser: ArgumentParser) -> None:
    """Take a key by its id, its prefix or its whole text."""
    parser.add_argument("key", help="The id or the prefix that listkeys shows, or the whole key.")


def find_key(named: str) -> ApiKey:
    """The one key that `named` means; raises CommandError."""
    matching = ApiKey.objects.filter(pk=int(named)) if named.isdecimal() and len(named) < 19 else None
    if matching is None:
        # Not what begins alike: a whole key with a slip in it must not name another.
        matching = ApiKey.objects.filter(Q(prefix=named) | Q(digest=digest_of(named)))
    match list(matching[:2]):
        case [key]:
            return key
        case []:
            raise CommandError(f"No key is named {named[:12]!r}: see manage.py listkeys.")
        case _:
            raise CommandError(f"More than one key begins with {named[:12]!r}: name it by its id.")


def find_user(named: str) -> User:
    """The User with this name or e-mail address; raises CommandError."""
    user = User.objects.filter(username=named).first() or User.objects.filter(email__iexact=named).first()
    if user is None:
        raise CommandError(f"No User has the name or address {named!r}: see manage.py createuser.")
    return user


def moment(text: str) -> datetime:
    """A time to come: ISO 8601, or `30d` for days from now."""
    try:
        when = timezone.now() + timedelta(days=int(text[:-1])) if text.endswith("d") else datetime.fromisoformat(text)
        # In UTC, as it is kept: PostgreSQL takes a time past 9999, and then no read of its row succeeds.
        when = (when if when.tzinfo else timezone.make_aware(when)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ArgumentTypeError("give an ISO 8601 time, or days such as 30d") from None
    if when <= timezone.now():
        raise ArgumentTypeError("this time is over")
    return when
