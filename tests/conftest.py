"""What the tests of the exporter share."""

import pytest
import writers
from exporting import export
from golden import tiny


@pytest.fixture(scope="module")
def tensors():
    return tiny.tensors()


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model.bin"


@pytest.fixture(scope="module")
def tiny_file(tensors, tmp_path_factory):
    """The tiny Llama from one float32 safetensors file, as f32."""
    folder = tmp_path_factory.mktemp("tiny")
    writers.hf_folder(folder / "tiny", tiny.CONFIG, tensors)
    return export(folder / "tiny", folder / "model.bin", "--dtype", "f32")
