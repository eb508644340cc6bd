"""Thousands of steps of tiny models: the shape checker would take nine tenths of the time. Tests that ask for `checked` have it."""

import jaxtyping
import pytest


@pytest.fixture(autouse=True)
def shape_checks(request):
    jaxtyping.config.update("jaxtyping_disable", "checked" not in request.fixturenames)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def checked():
    """With the shape checker."""
