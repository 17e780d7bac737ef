"""The ASGI application that uvicorn serves: `uvicorn acsinfra.asgi:application`."""

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "acsinfra.settings")

application = get_asgi_application()
