"""Base models, engines and Completions."""

from django.apps import AppConfig

from acsinfra.core.lifespan import while_serving


class InferenceConfig(AppConfig):
    """Base models, engines and Completions."""

    name = "inference"

    def ready(self) -> None:
        """The API's way to the workers ends with the API."""
        from inference.bus.api import bus_while_serving

        while_serving(bus_while_serving)
