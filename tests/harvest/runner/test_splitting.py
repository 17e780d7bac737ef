"""The one prompt that makes the engine fail is found among those that it held."""

from collections.abc import Sequence

import pytest

from harvest.runner.splitting import find_failing_prompt


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64])
def test_the_one_is_found_wherever_it_stands(length: int) -> None:
    suspects = [10 * index for index in range(length)]
    for fatal in suspects:
        asked: list[Sequence[int]] = []

        def can_read(some: Sequence[int], fatal: int = fatal, asked: list[Sequence[int]] = asked) -> bool:
            asked.append(some)
            return fatal not in some

        assert find_failing_prompt(suspects, can_read) == fatal
        assert len(asked) <= max(1, 2 * (length - 1).bit_length())


def test_nobody_is_blamed_for_what_does_not_happen_again() -> None:
    assert find_failing_prompt([3, 4, 5], lambda _: True) is None
    assert find_failing_prompt([3], lambda _: True) is None
    assert find_failing_prompt([], lambda _: False) is None


def test_nobody_is_blamed_for_what_only_some_together_do() -> None:
    assert find_failing_prompt(range(4), lambda some: not {0, 3} <= set(some)) is None
