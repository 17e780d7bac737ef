"""A client that openapi-python-client makes of the document works against the running API."""

import subprocess
import sys
import uuid
from importlib import import_module
from pathlib import Path

import httpx
import pytest

from acsinfra.core.views import openapi_document
from tests.stack import Stack


def test_a_client_generated_from_the_document_works(
    inference_stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, settings = tmp_path / "openapi.json", tmp_path / "settings.yaml"
    document.write_bytes(openapi_document())
    settings.write_text("post_hooks: []\n")
    generate = [sys.executable, "-m", "openapi_python_client", "generate", "--meta", "none", "--fail-on-warning"]
    where = ["--path", str(document), "--config", str(settings), "--output-path", str(tmp_path / "acs_generated")]
    result = subprocess.run([*generate, *where], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr

    monkeypatch.syspath_prepend(str(tmp_path))
    client = import_module("acs_generated").AuthenticatedClient(
        base_url=inference_stack.base_url, token=inference_stack.user.key, timeout=httpx.Timeout(120)
    )
    models = import_module("acs_generated.models")
    body = models.CompletionRequest(model="tiny", prompt="One", max_tokens=2, temperature=0.0)
    completion = import_module("acs_generated.api.completions.create_completion").sync(client=client, body=body)
    assert isinstance(completion, models.Completion)
    assert completion.usage.completion_tokens == 2
    create_job = import_module("acs_generated.api.jobs.create_completion_job")
    job = create_job.sync(
        client=client,
        body=models.CompletionJobRequest(model="tiny", prompt="One", max_tokens=2),
        idempotency_key=uuid.uuid4().hex,
    )
    assert isinstance(job, models.CompletionJob)
    found = import_module("acs_generated.api.jobs.get_completion_job").sync(job.id, client=client)
    assert found.id == job.id
    listed = import_module("acs_generated.api.models.list_models").sync(client=client)
    assert "tiny" in [model.id for model in listed.data]
    refused = import_module("acs_generated.api.models.get_model").sync("nothing", client=client)
    assert isinstance(refused, models.Error)
    assert refused.error.code == "model_not_found"
