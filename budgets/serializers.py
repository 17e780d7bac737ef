"""What the answers of the money look like."""

from typing import Any

from rest_framework import serializers


class KeyUsageSerializer(serializers.Serializer[dict[str, Any]]):
    """One API key's tokens in the period."""

    name = serializers.CharField(help_text="The key's name; empty for a key that was deleted.")
    prefix = serializers.CharField(help_text="The start of the key's text.")
    limit = serializers.IntegerField(allow_null=True, help_text="The key's cap; null: it has none.")
    used = serializers.IntegerField(help_text="Tokens charged to the key.")
    held = serializers.IntegerField(help_text="Tokens set aside for the key's running work.")
    remaining = serializers.IntegerField(help_text="Tokens the key can still hold: under its cap and in the Budget.")


class BudgetSerializer(serializers.Serializer[dict[str, Any]]):
    """The tokens of a User in the present period: a calendar month, UTC."""

    object = serializers.ChoiceField(choices=["budget"])
    period_start = serializers.DateTimeField(help_text="When the period began.")
    period_end = serializers.DateTimeField(help_text="When it ends and the next one begins, at zero.")
    limit = serializers.IntegerField(help_text="Tokens that the User may spend in the period.")
    used = serializers.IntegerField(help_text="Tokens charged in the period.")
    held = serializers.IntegerField(help_text="Tokens set aside for work that runs, taken in this period.")
    remaining = serializers.IntegerField(help_text="Tokens that can still be held: never below 0.")
    key = KeyUsageSerializer(help_text="The key of this request.")
    keys = KeyUsageSerializer(many=True, help_text="Every key of the User that works or was used in the period.")
