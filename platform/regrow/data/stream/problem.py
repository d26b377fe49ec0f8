"""What went wrong in a remote call, in a line."""

import traceback


def first_line_of(error: BaseException) -> str:
    error = getattr(error, "cause", None) or error  # what a RayTaskError wraps, not the remote traceback
    text = (str(error).strip().splitlines() or [""])[0][:200]
    if not text and error.__traceback__:  # an assertion says at least where
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{frame.filename}:{frame.lineno}: {frame.line}"
    return f"{type(error).__name__}: {text}"
