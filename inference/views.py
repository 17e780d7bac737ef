"""The views of `/v1/models` and `/v1/completions`."""

from functools import partial
from typing import cast

from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.models import ApiKey, User
from accounts.selectors import limit
from acsinfra.core.api_view import ApiView, is_large
from acsinfra.core.errors import ApiError, invalid
from acsinfra.core.idempotency import HEADER, IdempotentRequest, idempotent_request, read_idempotency_key
from acsinfra.core.threads import in_thread_if
from budgets.spend import require_spending_async
from inference.bus.api import running_bus
from inference.charges import Payer
from inference.completions import prepare_completion
from inference.idempotent import ROUTE, answer_once, kept_answer
from inference.responses import Exchange, answer_stream, answer_whole
from inference.schema import CREATE_COMPLETION, GET_MODEL, LIST_MODELS
from inference.selectors import catalogue, require_inference


class ModelsView(ApiView):
    """The Base models."""

    @LIST_MODELS
    async def get(self, request: Request) -> Response:
        """List the Base models.

        With what requests may ask of each, and whether Inference is there for it.
        """
        models = (await catalogue()).models
        return Response({"object": "list", "data": [model.as_json() for model in models.values()]})


class ModelView(ApiView):
    """One Base model."""

    @GET_MODEL
    async def get(self, request: Request, model_id: str) -> Response:
        """Get a Base model.

        `model_id` is the name that requests use. A model that an operator switched off is not there.
        """
        try:
            model = (await catalogue()).get(model_id)
        except ApiError as error:
            error.status = 404
            raise
        return Response(model.as_json())


class CompletionsView(ApiView):
    """Completions: OpenAI's shape with vLLM's extras."""

    @CREATE_COMPLETION
    async def post(self, request: Request) -> HttpResponseBase:
        """Create a Completion.

        Completes the prompts, and answers when all is there or, with `stream`, as it comes. OpenAI's Completions with
        vLLM's extras, the residual stream (`output_residual_stream`) and steering (`apply_steering_vectors`). It holds
        the prompts' tokens plus prompts × n × max_tokens while it runs, and is charged what the engine counted.
        """
        # The checks in the API's order: ApiView has done the key, the rate, the size and the JSON, and
        # `Exchange.begin` does the capacity's and the Budget's.
        asked = await self._asked_once(request)
        if asked is not None and (kept := await kept_answer(asked)) is not None:
            return kept
        if asked is not None and self.json.get("stream") is True:
            raise invalid(f"{HEADER} is not taken with stream.", param=HEADER)
        models = await catalogue()
        work = await prepare_completion(
            self.json,
            catalogue=models,
            request_id=request._request.request_id,  # type: ignore[attr-defined]
            is_large=is_large(request),
        )
        require_inference(models.get(work.model))
        await require_spending_async()
        user = cast("User", request.user)
        bus = await running_bus(is_served=_is_served)
        exchange = Exchange(bus, work)
        begin = partial(
            exchange.begin,
            payer=Payer(user, cast("ApiKey | None", request.auth)),
            at_once=limit(user, "requests_at_once") or 0,
            queued=limit(user, "requests_queued") or 0,
        )
        if asked is not None:
            return await answer_once(asked, exchange, begin=begin, bus=bus)
        try:
            await begin()
            return await (answer_stream(exchange) if work.stream else answer_whole(exchange))
        except BaseException:
            exchange.end()
            raise

    async def _asked_once(self, request: Request) -> IdempotentRequest | None:
        """The request as its Idempotency-Key stands for it; None where it has none."""
        key = read_idempotency_key(request, required=False)
        if key is None:
            return None
        read = partial(idempotent_request, user_id=cast("User", request.user).pk, key=key, route=ROUTE, body=self.json)
        return await in_thread_if(is_large(request), read)


async def _is_served(model: str) -> bool:
    found = (await catalogue()).models.get(model)
    return found is not None and found.inference_status != "unavailable"
