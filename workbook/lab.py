"""Open the workbook: JupyterLab on the learner's own copy of the pages, with no set-up.

``my_course/`` beside ``notebooks/`` has each page without outputs. A page that nobody has changed
is renewed when the course has a newer one; one that was changed is never written to.

JupyterLab reads the user's settings as usual. The settings that the workbook adds (no question
about news, a window layout) are in a temporary folder and in the environment's folder, so that no
file of the user is changed.
"""

import getpass
import hashlib
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from labkit.engine.files import write_atomically

SETTINGS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}
CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


def main(argv: list[str] | None = None) -> int:
    """Serve the workbook until Ctrl-C; ``argv`` goes to JupyterLab (``--port=9000`` and such).

    Raises:
        ValueError: there is no ``notebooks`` folder here or beside the package.
    """
    root = workbook_root()
    for kept in renew_course(root):
        print(
            f"my_course/{kept}: you have changed it, and the course has a newer page. It stays "
            f"as it is; labkit reset {kept[:2]} gives you the new one and keeps yours beside it."
        )
    argv = argv or []
    # JupyterLab refuses an option that is given twice.
    given = {option.partition("=")[0] for option in argv}
    for option in launch_options(root):
        if option.partition("=")[0] not in given:
            argv = [option, *argv]
    with tempfile.TemporaryDirectory(prefix="labkit-lab-") as folder:
        _prepare_environment(Path(folder))
        return _serve(root, argv)


def workbook_root() -> Path:
    """The folder that holds ``notebooks/``: the current one, or the clone labkit runs from."""
    candidates = [Path.cwd(), Path(__file__).resolve().parents[1]]
    for folder in candidates:
        if (folder / "notebooks").is_dir():
            return folder
    raise ValueError(
        f"no notebooks folder in {candidates[0]} nor in {candidates[1]}: "
        "run this from a clone of the workbook"
    )


def renew_course(root: Path) -> list[str]:
    """Copy new pages into ``my_course`` and renew those that nobody has changed.

    Returns:
        The names of changed pages of which the course has a newer version: they are left alone.
    """
    course = root / "my_course"
    kept = []
    course.mkdir(exist_ok=True)
    scripts = course / "scripts"
    if (root / "notebooks" / "scripts").is_dir() and not os.path.lexists(scripts):
        scripts.symlink_to("../notebooks/scripts")
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        page = _without_outputs(path)
        copy = course / path.name
        if copy.exists():
            copied_version, version = _versions_of(copy)
            if copied_version == page["metadata"]["copied"]:
                continue
            if copied_version != version:
                kept.append(path.name)
                continue
        write_atomically(copy, json.dumps(page, indent=1, ensure_ascii=False) + "\n")
    return kept


def reset_page(name: str) -> tuple[Path, Path | None]:
    """Put a fresh copy of a page into ``my_course``; a changed one is renamed, never removed.

    Args:
        name: the page's number or the beginning of its name: ``06``.

    Returns:
        The fresh page, and where the one before it is now.

    Raises:
        ValueError: no page, or more than one, has this name.
    """
    root = workbook_root()
    pages = sorted((root / "notebooks").glob("*.ipynb"))
    matching = [path for path in pages if path.name.startswith(name)]
    if len(matching) != 1 or not name:
        numbers = ", ".join(path.name[:2] for path in pages)
        raise ValueError(f"reset takes the number of one page: {numbers}; got {name!r}")
    copy = root / "my_course" / matching[0].name
    if not copy.exists():
        renew_course(root)
        return copy, None
    number = 1
    while (old := copy.with_name(f"{copy.stem}-before-{number}.ipynb")).exists():
        number += 1
    copy.rename(old)
    renew_course(root)
    return copy, old


def _without_outputs(path: Path) -> dict[str, Any]:
    from ipykernel.ipkernel import IPythonKernel

    page = json.loads(path.read_text(encoding="utf-8"))
    for cell in page["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = []
            cell["execution_count"] = None
    page["metadata"]["copied"] = _version(page)
    # With another version of Python than the kernel's, JupyterLab would call the page changed.
    page["metadata"]["language_info"] = dict(IPythonKernel.language_info)
    return page


def _versions_of(copy: Path) -> tuple[str | None, str | None]:
    """The version that was copied, and the page's version now; what cannot be read was changed."""
    try:
        page = json.loads(copy.read_text(encoding="utf-8"))
        return page["metadata"].get("copied"), _version(page)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None, ""


def _version(page: dict[str, Any]) -> str:
    """A hash of the cells' sources alone: outputs and settings are no change."""
    sources = [[cell["cell_type"], "".join(cell["source"])] for cell in page["cells"]]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def first_page(root: Path) -> str:
    """The page to open, as a path below JupyterLab's address."""
    # By the course's names: a page kept by ``labkit reset`` may come before its fresh copy.
    first = min((path.name for path in (root / "notebooks").glob("*.ipynb")), default=None)
    return f"lab/tree/my_course/{first}" if first else "lab"


def launch_options(root: Path) -> list[str]:
    """JupyterLab's options for this machine: no browser where none can open, root allowed."""
    options = [
        f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url=/{first_page(root)}",
        "--Application.log_level=WARN",
        # Elsewhere, Jupyter starts kernels as it always does.
        "--KernelProvisionerFactory.default_provisioner_name=labkit-warm",
        f"--IdentityProvider.token={os.environ.get('JUPYTER_TOKEN') or secrets.token_hex(16)}",
    ]
    if no_browser_reason():
        options.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--allow-root")
    return options


def no_browser_reason() -> str:
    """The reason why no browser can be opened from here, or an empty string when one can."""
    if os.environ.get("SSH_CONNECTION"):
        return "this is an SSH session"
    if any(Path(mark).exists() for mark in CONTAINER_MARKS):
        return "this is a container"
    has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform.startswith("linux") and not has_display:
        return "this machine has no display"
    return ""


def _prepare_environment(folder: Path) -> None:
    (folder / "labconfig").mkdir()
    (folder / "labconfig" / "default_setting_overrides.json").write_text(json.dumps(SETTINGS))
    paths = [os.environ.get("JUPYTER_CONFIG_PATH"), str(folder)]
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, paths))
    # A kernel named python3 in the user's folders must not win over this environment's.
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    # A separate layout: otherwise the tabs of other projects would open here, and ours there.
    os.environ.setdefault("JUPYTERLAB_WORKSPACES_DIR", f"{sys.prefix}/var/labkit/workspaces")


def _serve(root: Path, argv: list[str]) -> int:
    from workbook.kernels.provisioner import WarmProvisioner

    WarmProvisioner.warm_up()  # It imports while JupyterLab does.
    from jupyterlab.labapp import LabApp

    server = LabApp.initialize_server(argv=argv)
    signal.signal(signal.SIGINT, lambda *_: _stop(server))
    # The server binds its port in a callback that is queued before this one.
    server.io_loop.add_callback(lambda: print(_announcement(server, root), flush=True))
    server.start()
    print("The workbook is closed.")
    return 0


def _stop(server) -> None:
    # Jupyter's own handler asks a y/n question at a terminal, and elsewhere leaves files behind.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("\nClosing the workbook and its kernels ...", flush=True)
    server.stop(from_signal=True)


def _announcement(server, root: Path) -> str:
    address = f"{server.connection_url}{first_page(root)}?token={server.identity_provider.token}"
    port = server.port
    lines = [f"\n  The workbook is open at\n\n      {address}\n"]
    reason = "" if server.open_browser else no_browser_reason()
    if reason:
        lines.append(f"  Open that address in a browser yourself: {reason}.")
    if "SSH" in reason:
        lines.append("  On your own machine, first open a tunnel and keep it open:")
        login = f"{getpass.getuser()}@{socket.gethostname()}"
        lines.append(f"      ssh -N -L {port}:localhost:{port} {login}")
    if "container" in reason:
        options = f"--ip=0.0.0.0 --port={port}"
        lines.append(
            f'  Publish port {port} and serve on all addresses: make lab ARGS="{options}"'
        )
    return "\n".join([*lines, "  Ctrl-C in this window closes it.", ""])
