"""Users of the stack who sign in to the App."""

from dataclasses import dataclass
from itertools import count

from playwright.sync_api import Page

from tests.stack import GENEROUS, Stack

PASSWORD = "a lamp in the window"
_MAKE = """
from accounts.models import User
from accounts.services import create_key, create_user
user = create_user(username=name, email=f"{name}@example.org", password=password, is_staff=is_operator)
User.objects.filter(pk=user.pk).update(is_superuser=is_operator, **limits)
key, text = create_key(user=user, name="first key")
result = {"id": user.pk, "key_id": key.pk, "username": name, "key": text}
"""
_numbers = count(1)


@dataclass(frozen=True)
class Person:
    """A User of the stack's database, the text of their key, and the password they sign in with."""

    id: int
    key_id: int
    username: str
    key: str
    password: str = PASSWORD


def new_person(stack: Stack, *, is_operator: bool = False) -> Person:
    """Make a User with a password, a key and generous limits; an operator may do everything in the admin."""
    name = f"person{next(_numbers)}"
    made = stack.django(_MAKE, name=name, password=PASSWORD, is_operator=is_operator, limits=GENEROUS)
    return Person(**made)


def sign_in(page: Page, person: Person, *, to: str = "/app") -> None:
    """Sign in by the form, and stand on the page `to`."""
    page.goto(f"/app/sign-in?next={to}")
    page.get_by_label("Name").fill(person.username)
    page.get_by_label("Password").fill(person.password)
    page.get_by_role("main").get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"**{to}")
