"""What the tests of the exporter share."""

import pytest
from golden import tiny


@pytest.fixture(scope="module")
def tensors():
    return tiny.tensors()


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model.bin"
