"""The view of `/v1/budget`."""

from rest_framework.request import Request
from rest_framework.response import Response

from acsinfra.core.api_view import ApiView
from budgets.schema import GET_BUDGET
from budgets.selectors import budget_summary_async


class BudgetView(ApiView):
    """The Budget of the User whose key it is."""

    @GET_BUDGET
    async def get(self, request: Request) -> Response:
        """Get the Budget.

        What this month's has, used, holds and has left, in all and for each API key.
        """
        summary = await budget_summary_async(request.auth.user)
        return Response(summary.as_json(api_key_id=request.auth.pk))
