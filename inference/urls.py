"""Routes of inference."""

from django.urls import path

from inference.pages import WorkbenchCompletionsView, WorkbenchModelsView, WorkbenchPage
from inference.views import CompletionsView, ModelsView, ModelView

urlpatterns = [
    path("v1/completions", CompletionsView.as_view()),
    path("v1/models", ModelsView.as_view()),
    path("v1/models/<str:model_id>", ModelView.as_view()),
    path("app/workbench", WorkbenchPage.as_view(), name="workbench"),
    path("app/workbench/models", WorkbenchModelsView.as_view(), name="workbench-models"),
    path("app/workbench/completions", WorkbenchCompletionsView.as_view(), name="workbench-completions"),
]
