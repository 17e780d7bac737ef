"""The views of `/v1/models`."""

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from acsinfra.core.api_view import ApiView
from acsinfra.core.errors import ApiError
from inference.selectors import catalogue
from inference.serializers import ModelListSerializer, ModelSerializer


class ModelsView(ApiView):
    """The Base models."""

    @extend_schema(operation_id="list_models", responses=ModelListSerializer)
    async def get(self, request: Request) -> Response:
        """List the Base models, with what requests may ask of each and whether Inference is there for it."""
        models = (await catalogue()).models
        return Response({"object": "list", "data": [model.as_json() for model in models.values()]})


class ModelView(ApiView):
    """One Base model."""

    @extend_schema(operation_id="get_model", responses=ModelSerializer)
    async def get(self, request: Request, model_id: str) -> Response:
        """Return the Base model that requests call `model_id`."""
        try:
            model = (await catalogue()).get(model_id)
        except ApiError as error:
            error.status = 404
            raise
        return Response(model.as_json())
