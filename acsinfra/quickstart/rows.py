"""Bring the database's rows up to date for a start: `python -m acsinfra.quickstart.rows`, JSON in, JSON out.

A process of its own, because the settings of the quickstart's process were read before there was a database.
"""

import json
import os
import secrets
import sys
from typing import Any

import django

USERNAME = "operator"
EMAIL = "operator@localhost.localdomain"
KEY_NAME = "quickstart"


def main() -> None:
    """Migrate, add or change the models, and give the operator a new password and key. Refuses the ones before."""
    request = json.load(sys.stdin)
    answers, sys.stdout = sys.stdout, sys.stderr
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "acsinfra.settings")
    django.setup()
    from django.core.exceptions import FieldError, ValidationError
    from django.core.management import call_command

    from inference.checkpoints import CheckpointError

    call_command("migrate", verbosity=0, interactive=False)
    for model in request["models"]:
        try:
            save_model(**model)
        except (AttributeError, CheckpointError, FieldError, TypeError, ValidationError) as error:
            sentences = error.messages if isinstance(error, ValidationError) else [str(error)]
            sys.exit(f"The model {model['name']}: {' '.join(sentences)}")
    json.dump(renew_operator(), answers)


def save_model(*, name: str, **fields: Any) -> None:
    """Add the Base model `name`, or change what differs."""
    from inference.models import BaseModel
    from inference.services import add_model, update_model

    model = BaseModel.objects.filter(name=name).first()
    if model is None:
        add_model(name=name, **fields)
    elif changes := {field: value for field, value in fields.items() if getattr(model, field) != value}:
        update_model(model=model, **changes)


def renew_operator() -> dict[str, str]:
    """Return the operator's name, new password and new key; those of the starts before are refused from now on."""
    from accounts.models import ApiKey, User
    from accounts.services import create_key, create_user, revoke_key

    user = User.objects.filter(username=USERNAME).first() or create_user(username=USERNAME, email=EMAIL)
    password = secrets.token_urlsafe(15)
    user.set_password(password)
    user.is_staff = user.is_superuser = user.is_active = True
    user.save()
    for key in ApiKey.objects.filter(user=user, name=KEY_NAME, revoked_at=None):
        revoke_key(key=key)
    _, text = create_key(user=user, name=KEY_NAME)
    return {"username": user.username, "password": password, "api_key": text}


if __name__ == "__main__":
    main()
