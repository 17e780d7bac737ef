"""What drf-spectacular says about API keys."""

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension


class ApiKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """`Authorization: Bearer <key>`."""

    target_class = "accounts.authentication.ApiKeyAuthentication"
    name = "bearer"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        """The scheme, in OpenAPI's words."""
        return {
            "type": "http",
            "scheme": "bearer",
            "description": "An API key: `Authorization: Bearer sk-acs-...`, or one of the old platform, `acs-bm-...`.",
        }
