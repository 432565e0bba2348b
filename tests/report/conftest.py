import pytest

from tests.report.browser import browsing


@pytest.fixture(scope="module")
def browser():
    with browsing() as opened:
        yield opened
