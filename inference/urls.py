"""Routes of inference."""

from django.urls import path

from inference.views import CompletionsView, ModelsView, ModelView

urlpatterns = [
    path("v1/completions", CompletionsView.as_view()),
    path("v1/models", ModelsView.as_view()),
    path("v1/models/<str:model_id>", ModelView.as_view()),
]
