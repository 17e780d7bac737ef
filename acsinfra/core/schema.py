"""What drf-spectacular cannot see in our fields by itself."""

from typing import Any

from drf_spectacular.extensions import OpenApiSerializerFieldExtension


class StrictFloatExtension(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]
    """`above` as OpenAPI 3.1's `exclusiveMinimum`."""

    target_class = "acsinfra.core.fields.StrictFloatField"

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        """The schema of the field."""
        mapped: dict[str, Any] = auto_schema._map_serializer_field(self.target, direction, bypass_extensions=True)
        if self.target.above is not None:
            mapped["exclusiveMinimum"] = self.target.above
        return mapped
