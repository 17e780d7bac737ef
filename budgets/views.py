"""The view of `/v1/budget`."""

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from acsinfra.core.api_view import ApiView
from budgets.selectors import budget_summary_async
from budgets.serializers import BudgetSerializer


class BudgetView(ApiView):
    """The Budget of the User whose key it is."""

    @extend_schema(operation_id="get_budget", responses=BudgetSerializer)
    async def get(self, request: Request) -> Response:
        """Return what this month's Budget has, used, holds and has left, in all and for each API key."""
        summary = await budget_summary_async(request.auth.user)
        return Response(summary.as_json(api_key_id=request.auth.pk))
