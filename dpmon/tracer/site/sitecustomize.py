"""How dpmon gets into a Python process: `site` imports this file because its folder is first on PYTHONPATH.

It removes the folder from sys.path, arranges for the tracer to start when torch is imported, and runs the sitecustomize
that it shadows. It must not raise: it runs before the user's script, in every Python process that the script starts.
"""


def _install_import_hook() -> None:
    import os
    import sys

    own_directory = os.path.dirname(os.path.abspath(__file__))
    # Not abspath, which needs the working directory: it may be deleted.
    sys.path[:] = [entry for entry in sys.path if os.path.normpath(entry) != own_directory]
    if "DPMON_RUN" not in os.environ or sys.version_info < (3, 8):  # the import hook's syntax is that of Python 3.8
        return
    # dpmon may not be installed for the program's Python. So the folder that contains dpmon is on sys.path during this
    # import only.
    package_parent = os.path.dirname(os.path.dirname(os.path.dirname(own_directory)))
    sys.path.insert(0, package_parent)
    try:
        from dpmon.tracer import torch_import_hook
    finally:
        sys.path.remove(package_parent)
    torch_import_hook.install_import_hook()


def _run_shadowed_sitecustomize() -> None:
    """Import the sitecustomize that Python would find without ours; pass its exceptions on."""
    import sys

    own_module = sys.modules.pop(__name__)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401 - may not exist
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules[__name__] = (
            own_module  # the import system expects it; dpmon.tracer.torch_import_hook removes it later
        )


try:  # noqa: SIM105 - contextlib is not loaded yet in every Python
    _install_import_hook()
except Exception:  # noqa: BLE001 - a fault of ours must not stop the user's program
    pass
_run_shadowed_sitecustomize()
