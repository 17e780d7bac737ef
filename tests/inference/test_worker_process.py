"""How an inference worker is set up."""

import pytest

from inference.worker.process import requests_at_once


@pytest.mark.parametrize("sequences", [1, 2, 3, 64, 256])
def test_some_completions_wait_in_the_engine_for_a_sequence_that_ends(sequences: int) -> None:
    assert sequences < requests_at_once(sequences) <= 2 * sequences
