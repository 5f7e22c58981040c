"""Jobs of the command line."""

import pytest


@pytest.fixture
def mpipipe(launch):
    """mpipipe(ranks, arguments): a job that runs `python -m mpipipe arguments`."""
    return lambda ranks, *arguments, **options: launch(ranks, ["-m", "mpipipe", *map(str, arguments)], **options)
