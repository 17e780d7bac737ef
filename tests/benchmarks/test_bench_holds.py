"""`manage.py bench holds`."""

import io
import json

import pytest
from django.core.management import call_command

from accounts.models import User
from budgets.models import Hold


@pytest.mark.django_db(transaction=True)
def test_it_measures_and_leaves_nothing_behind() -> None:
    output = io.StringIO()
    call_command("bench", "holds", "--json", "--seconds", "0.5", "--at-once", "1", "4", "--budgets", "2", stdout=output)
    report = json.loads(output.getvalue())
    assert report["imbalances"] == 0
    assert [(figures["via"], figures["at_once"]) for figures in report["rounds"]] == [
        ("threads", 1),
        ("async", 1),
        ("threads", 4),
        ("async", 4),
    ]
    for figures in report["rounds"]:
        assert figures["holds_per_s"] > 0
        assert 0 < figures["p50_ms"] <= figures["p99_ms"]
    assert not User.objects.exists()
    assert not Hold.objects.exists()
