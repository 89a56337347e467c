"""Fixtures that several files of this folder share."""

import pytest

from tests.jaxdit._weights_cases import save_cases


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of every small checkpoint."""
    return save_cases(tmp_path_factory.mktemp("weights"))
