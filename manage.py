#!/usr/bin/env python
"""Django's command line: `uv run manage.py quickstart` is where to begin."""

import os
import sys
from datetime import UTC, datetime

if __name__ == "__main__":
    # A shell may have another project's still; `--settings` is for those who mean it.
    os.environ["DJANGO_SETTINGS_MODULE"] = "acsinfra.settings"
    from acsinfra.command_line import run

    began = datetime.now(UTC)
    run(sys.argv)
    if sys.argv[1:2] in (["createsuperuser"], ["changepassword"]):
        # Django's own two that give power; ours note themselves.
        from accounts.audit import note_djangos_own

        note_djangos_own(sys.argv[1:], since=began)
