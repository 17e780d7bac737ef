"""What the OpenAPI document says of `/v1/budget`."""

from typing import Any, Final

from drf_spectacular.utils import OpenApiExample, OpenApiResponse

from acsinfra.core.schema import documented
from budgets.serializers import BudgetSerializer

KEY: Final[dict[str, Any]] = {
    "name": "probing",
    "prefix": "sk-acs-3fQ9h",
    "limit": None,
    "used": 118_204,
    "held": 0,
    "remaining": 4_881_796,
}
BUDGET: Final[dict[str, Any]] = {
    "object": "budget",
    "period_start": "2026-11-01T00:00:00.000+00:00",
    "period_end": "2026-12-01T00:00:00.000+00:00",
    "limit": 5_000_000,
    "used": 118_204,
    "held": 0,
    "remaining": 4_881_796,
    "key": KEY,
    "keys": [KEY],
}

GET_BUDGET = documented(
    operation_id="get_budget",
    tag="Budget",
    responses={
        200: OpenApiResponse(
            BudgetSerializer, description="The month's Budget.", examples=[OpenApiExample("budget", value=BUDGET)]
        )
    },
)
