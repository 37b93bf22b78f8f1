"""Writing files so that a crash, a stop or a full disk never leaves half of one."""

import os
import threading
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside, then rename: a full disk or a stop leaves the old file as it was."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        if isinstance(content, bytes):
            beside.write_bytes(content)
        else:
            beside.write_text(content, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
