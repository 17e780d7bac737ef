"""Base models, engines and Completions."""

from django.apps import AppConfig


class InferenceConfig(AppConfig):
    """Base models, engines and Completions."""

    name = "inference"
