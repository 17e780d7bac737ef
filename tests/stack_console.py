"""Run pieces of Python with Django set up: a line of JSON in, a line of JSON out."""

import json
import os
import sys
import traceback

import django
from django.db import close_old_connections


def main() -> None:
    """Serve standard input until it closes. Whatever the code prints goes to standard error."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "acsinfra.settings")
    django.setup()
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        names = dict(request["names"])
        try:
            close_old_connections()
            exec(request["code"], names)
            answer = json.dumps({"result": names.get("result")})
        except Exception:  # noqa: BLE001 - the asker gets it
            answer = json.dumps({"error": traceback.format_exc()})
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
