"""The Celery app. Workers start with `manage.py inference MODEL` and `manage.py runner MODEL`."""

import os

from celery import Celery
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "acsinfra.settings")

app = Celery("acsinfra")
app.config_from_object(settings.CELERY)
app.autodiscover_tasks()
