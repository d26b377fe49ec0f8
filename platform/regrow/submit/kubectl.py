"""kubectl as a program: what it is asked, what it answers, and its failures as one line."""

import json
import shlex
import shutil
import subprocess
import sys
from typing import Any

from regrow.errors import ClusterError

TIMEOUT_S = 60.0
FIELD_MANAGER = "regrow"


class Kubectl:
    """One namespace of one cluster, through the user's own kubectl and its credentials."""

    def __init__(self, *, namespace: str, context: str | None) -> None:
        """Raises ClusterError where there is no kubectl."""
        program = shutil.which("kubectl")
        if program is None:
            raise ClusterError(
                "kubectl is not on PATH; install it, use submit.backend=ray, or take the manifests of "
                "submit.action=render elsewhere"
            )
        self._options = [*(["--context", context] if context else []), "--namespace", namespace]
        self._command = [program, *self._options]

    def written(self, *arguments: str) -> str:
        """A command for a person to type."""
        return shlex.join(["kubectl", *self._options, *arguments])

    def apply(self, manifests: str) -> str:
        """Server-side, refusing fields that the cluster does not know; what kubectl says of it."""
        options = ["--server-side", f"--field-manager={FIELD_MANAGER}", "--validate=strict"]
        return self._ask(["apply", *options, "--filename=-"], manifests)

    def diff(self, manifests: str) -> str:
        """What applying would change, as a unified diff; empty where nothing would."""
        options = ["--server-side", f"--field-manager={FIELD_MANAGER}"]
        return self._ask(["diff", *options, "--filename=-"], manifests, fine=(0, 1))

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """An object; None where there is none."""
        text = self._ask(["get", kind, name, "--ignore-not-found", "--output=json"])
        return json.loads(text) if text.strip() else None

    def select(self, kind: str, selector: str) -> list[dict[str, Any]]:
        """The objects that have these labels."""
        text = self._ask(["get", kind, f"--selector={selector}", "--output=json"])
        return list(json.loads(text)["items"])

    def delete(self, kind: str, name: str) -> None:
        """Delete an object, and wait until it is gone."""
        self._ask(["delete", kind, name, "--ignore-not-found", "--wait=true"], timeout_s=600.0)

    def exec(self, pod: str, container: str, command: list[str]) -> str:
        """What a command in a container prints."""
        return self._ask(["exec", pod, f"--container={container}", "--", *command])

    def follow(self, what: str, *options: str) -> int:
        """Pass an object's logs on to stdout until they end; kubectl's status."""
        return subprocess.run(
            [*self._command, "logs", "--follow", what, *options], stdin=subprocess.DEVNULL, check=False
        ).returncode

    def _ask(
        self,
        arguments: list[str],
        text: str | None = None,
        *,
        fine: tuple[int, ...] = (0,),
        timeout_s: float = TIMEOUT_S,
    ) -> str:
        try:
            done = subprocess.run(
                [*self._command, *arguments],
                input=text if text is not None else "",
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"kubectl {arguments[0]} has not answered for {timeout_s:g} s") from error
        if done.returncode not in fine or (done.returncode and not done.stdout):
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            raise ClusterError(f"kubectl {arguments[0]}: {' / '.join(lines[-3:]) or f'status {done.returncode}'}")
        if done.stderr.strip():
            print(done.stderr.rstrip(), file=sys.stderr)  # warnings
        return done.stdout
