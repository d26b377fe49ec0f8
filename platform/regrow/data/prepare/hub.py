"""What Hugging Face's hub has at an hf:// location, asked without Arrow and without patience.

HF_ENDPOINT, HF_TOKEN and HTTPS_PROXY mean what they mean to `huggingface_hub`, which is imported when it is needed.
"""

from typing import Any

from regrow.errors import DataError, UnseenError, first_line


def is_hub(location: str | None) -> bool:
    return location is not None and location.startswith("hf://")


def files_on_hub(setting: str, location: str) -> dict[str, int]:
    """Bytes of each file that a file, a folder or a glob on the hub names, by path; `setting` is whose value it is.

    Raises UnseenError where the hub does not answer, DataError where it has nothing there.
    """
    from huggingface_hub import HfFileSystem, constants

    endpoint, path = constants.ENDPOINT, location.removeprefix("hf://")
    hub = HfFileSystem()  # as Arrow makes its own: what this one lists, that one need not ask for again
    found: Any  # by path
    try:
        found = hub.glob(path, detail=True) if "*" in path else hub.find(path, detail=True)
    except FileNotFoundError as error:
        raise DataError(
            f"{setting}={location} is not on the hub at {endpoint}, or not for everyone (HF_TOKEN): {first_line(error)}"
        ) from error
    except (ValueError, NotImplementedError) as error:  # a location that names no repository
        raise DataError(f"{setting}={location} is no location on a hub: {first_line(error)}") from error
    except Exception as error:  # HTTP clients have classes of their own
        raise UnseenError(
            f"{setting}={location}: the hub at {endpoint} cannot be reached ({first_line(error)}); set HF_ENDPOINT to "
            f"a mirror or HTTPS_PROXY to a proxy, or {setting} to a copy that this machine can reach"
        ) from error
    files = {name: int(info["size"]) for name, info in found.items() if info["type"] == "file"}
    if not files:
        raise DataError(f"{setting}={location}: the hub at {endpoint} has no file there")
    return files
