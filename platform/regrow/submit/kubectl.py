"""kubectl as a program: what it is asked, what it answers, and its failures as one line."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from regrow.errors import ClusterError

TIMEOUT_S = 60.0
FIELD_MANAGER = "regrow"
LINES = 5  # of a refusal that are shown

Object = dict[str, Any]


class Unreachable(ClusterError):
    """The API server gives no answer just now; the same question may have one later."""


class Kubectl:
    """One namespace of one cluster, through the user's own kubectl and its credentials.

    Whatever is asked raises ClusterError with kubectl's reason in one line; Unreachable where none came.
    """

    def __init__(self, *, namespace: str, context: str | None) -> None:
        """Raises ClusterError where there is no kubectl."""
        program = shutil.which("kubectl")
        if program is None:
            raise ClusterError(
                "kubectl is not on PATH; install it, use submit.backend=ray, or take the manifests of "
                "submit.action=render elsewhere"
            )
        self.namespace, self.context = namespace, context
        self._options = [*(["--context", context] if context else []), "--namespace", namespace]
        self._command = [program, *self._options]

    @property
    def environment(self) -> dict[str, str]:
        """This process's, without what has kubectl ask back, print otherwise or compare with another program."""
        kept = {name: value for name, value in os.environ.items() if name != "KUBECTL_EXTERNAL_DIFF"}
        return kept | {"KUBERC": "off"}

    def written(self, *arguments: str) -> str:
        """A command for a person to type."""
        return shlex.join(["kubectl", *self._options, *arguments])

    def apply(self, manifests: str) -> str:
        """Server-side, refusing fields that the cluster does not know; what kubectl says of it."""
        options = ["--server-side", f"--field-manager={FIELD_MANAGER}", "--validate=strict"]
        return self._ask(["apply", *options, "--filename=-"], manifests)

    def trial(self, manifests: str) -> None:
        """Have the server refuse what it would refuse of new objects: unknown fields, wrong types, admission."""
        options = ["--dry-run=server", f"--field-manager={FIELD_MANAGER}", "--validate=strict"]
        try:
            self._ask(["create", *options, "--filename=-"], manifests)
        except ClusterError as error:
            if not _HAS_A_PLACE.search(str(error)):
                raise

    def diff(self, manifests: str) -> str:
        """What applying would change, as a unified diff; empty where nothing would."""
        # a dry run: fields that KubeRay, Kueue or another kubectl own are compared like the rest
        options = ["--server-side", f"--field-manager={FIELD_MANAGER}", "--force-conflicts"]
        return _without_noise(self._ask(["diff", *options, "--filename=-"], manifests, fine=(0, 1)))

    def get(self, kind: str, name: str) -> Object | None:
        """An object; None where there is none."""
        text = self._ask(["get", kind, name, "--ignore-not-found", "--output=json"])
        return json.loads(text) if text.strip() else None

    def select(self, kind: str, selector: str) -> list[Object]:
        """The objects that have these labels."""
        return self._items(kind, f"--selector={selector}")

    def warnings(self) -> list[Object]:
        """The namespace's events of type Warning; the server forgets them after an hour."""
        return self._items("events", "--field-selector=type=Warning")

    def delete(self, kind: str, name: str) -> None:
        """Ask for an object's deletion, which may wait for its finalizers."""
        self._ask(["delete", kind, name, "--ignore-not-found", "--wait=false"])

    def uid(self, kind: str, name: str) -> str:
        """Of an object that is there; empty where there is none."""
        return self._ask(["get", kind, name, "--ignore-not-found", "--output=jsonpath={.metadata.uid}"]).strip()

    def give_to(self, kind: str, name: str, owner: Object, uid: str) -> None:
        """Have an object be deleted when its owner is."""
        reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
        reference |= {"name": owner["metadata"]["name"], "uid": uid}
        patch = json.dumps({"metadata": {"ownerReferences": [reference]}})
        self._ask(["patch", kind, name, "--type=merge", f"--patch={patch}"])

    def exec(self, pod: str, container: str, command: list[str]) -> str:
        """What a command in a container prints."""
        return self._ask(["exec", pod, f"--container={container}", "--", *command])

    def logs(self, what: str, show: Callable[[bytes], None], *, since: str | None = None) -> str | None:
        """Pass each line of a pod's logs, with its time before it, on to `show` until they end.

        Returns None where they ended, else why they broke off. A line that was cut off is left out.
        """
        options = ["--follow", "--timestamps", *([f"--since-time={since}"] if since else [])]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [*self._command, "logs", what, *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self.environment,
            )
            assert process.stdout is not None
            try:
                cut = b""
                for line in process.stdout:
                    if line.endswith(b"\n"):
                        show(line)
                    else:
                        cut = line
                status = process.wait()
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
            if status == 0:
                if cut:
                    show(cut + b"\n")
                return None
            errors.seek(0)
            return str(_error("logs", status, errors.read().decode(errors="replace")))

    def last_lines(self, what: str, count: int) -> str:
        """The end of a pod's logs."""
        return self._ask(["logs", what, f"--tail={count}"])

    def _items(self, kind: str, *options: str) -> list[Object]:
        return list(json.loads(self._ask(["get", kind, *options, "--output=json"]))["items"])

    def _ask(self, arguments: list[str], text: str = "", *, fine: Sequence[int] = (0,)) -> str:
        try:
            done = subprocess.run(
                [*self._command, *arguments],
                input=text,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
                env=self.environment,
            )
        except subprocess.TimeoutExpired as error:
            raise Unreachable(f"kubectl {arguments[0]} has not answered for {TIMEOUT_S:g} s") from error
        if done.returncode not in fine or (done.returncode and not done.stdout):
            raise _error(arguments[0], done.returncode, done.stderr)
        for line in _lines(done.stderr):
            print(line, file=sys.stderr)  # warnings
        return done.stdout


_HAS_A_PLACE = re.compile(r"\(AlreadyExists\)|exceeded quota: .*count/")  # looked at last; taken by the job of before
# the server's count of changes; Kueue's switch; a submission's owner, each time another
_NOISE = re.compile(r"[-+](  generation: \d+|  suspend: (true|false)| +value: rayjob-[0-9a-f]{16})$")
_LOG = re.compile(r"^[EWIF]\d{4} \d\d:")  # kubectl's own log, which repeats what its last line says
_ADVICE = re.compile(r"^(Please review the fields above|See 'kubectl)")
_QUOTED = re.compile(r"\"[^\"]*\"|(?<!\w)'[^']*'(?!\w)")  # names and values, which are a user's
_REFUSED = re.compile(r"\((Forbidden|Invalid|NotFound|BadRequest|Conflict)\)")  # an answer, whatever words it has
_NOT_NOW = re.compile(
    r"""was\ refused|connection\ (refused|reset)|\bEOF\b|time(d\ )?\s?out|no\ such\ host|network\ is\ unreachable
    |no\ route\ to\ host|context\ deadline\ exceeded|client\ connection\ lost|broken\ pipe|server\ closed
    |temporary\ failure|currently\ unable\ to\ handle|too\ many\ requests|shutting\ down|etcdserver|leader\ changed
    |code\ =\ Unavailable
    |\((ServiceUnavailable|InternalError|Timeout|ServerTimeout|TooManyRequests)\)|unexpected\ server\ response""",
    re.VERBOSE | re.IGNORECASE,
)
_HINTS = (
    (
        re.compile(r"have a resource type \"?ray|no matches for kind \"Ray"),
        "is KubeRay installed in this cluster? k8s/README.md, 'Once per cluster'",
    ),
    (
        re.compile(r"\(Forbidden\).*networkpolicies"),
        "have k8s/rbac.yaml applied again, which allows it, or set submit.network_policy=false",
    ),
    (
        re.compile(r"\(Unauthorized\)|to provide credentials"),
        "the credentials of kubectl's context are not, or no longer, accepted",
    ),
)


def _without_noise(diff: str) -> str:
    """A unified diff without the changes that no setting made; any other text as it is.

    >>> _without_noise("--- a\\n+++ b\\n@@ -1 +1 @@\\n-  generation: 1\\n+  generation: 2\\n")
    ''
    """
    heading, *hunks = re.split(r"^(?=@@ )", diff, flags=re.MULTILINE)
    kept = []
    for hunk in hunks:
        lines = [line for line in hunk.splitlines(keepends=True) if not _NOISE.match(line.rstrip("\n"))]
        if any(line[0] in "-+" for line in lines):
            kept.append("".join(lines))
    return heading + "".join(kept) if kept or not hunks else ""


def _lines(stderr: str) -> list[str]:
    lines = [line.strip() for line in stderr.splitlines()]
    return [line for line in lines if line and not _LOG.match(line)]


def _error(verb: str, status: int, stderr: str) -> ClusterError:
    """What kubectl says, its headline first.

    >>> str(_error("get", 1, 'E1123 08:14:25 memcache.go:265] "Unhandled"\\nerror: context "nope" does not exist\\n'))
    'kubectl get: context "nope" does not exist'
    """
    lines = _lines(stderr) or [stderr.strip().splitlines()[-1] if stderr.strip() else f"status {status}"]
    kept: list[str] = []
    for line in lines:
        if _ADVICE.match(line):
            break
        kept.append(line.removeprefix("error: "))
    shown = kept[-LINES:] if verb == "exec" else kept[:LINES]  # a traceback of the command ends with its reason
    if len(kept) > LINES and verb != "exec":
        shown.append(f"and {len(kept) - LINES} more lines")
    text = f"kubectl {verb}: {' / '.join(shown)}"
    for pattern, hint in _HINTS:
        if pattern.search(text):
            text += f"; {hint}"
    said = _QUOTED.sub("", text)
    return Unreachable(text) if _NOT_NOW.search(said) and not _REFUSED.search(said) else ClusterError(text)


class PodLogs:
    """Takes lines as `kubectl logs --timestamps` has them, and passes on those that it did not before.

    Where to go on is told by the newest line's own time, never by this machine's clock. The server knows whole seconds
    only, and sends the lines of that second again.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._newest, self._at_newest = b"", 0  # a time, and how many lines of it were passed on
        self._newest_key = NEVER
        self._skip = 0  # lines of that time that come again

    @property
    def since(self) -> str | None:
        """The time to ask for lines from; None: from the beginning."""
        return self._newest.decode() or None

    def reconnect(self) -> None:
        """The lines of the newest time may come again."""
        self._skip = self._at_newest

    def take(self, line: bytes) -> None:
        """A line with its time before it; one without, which is the kubelet's own, is passed on."""
        time, _, text = line.partition(b" ")
        key = _sortable(time)
        if key is None:
            self._write(line)
            return
        if key < self._newest_key:
            return
        if key > self._newest_key:
            self._newest, self._newest_key, self._at_newest, self._skip = time, key, 0, 0
        elif self._skip:
            self._skip -= 1
            return
        self._at_newest += 1
        self._write(text)


NEVER = (0.0, "")
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[-+]\d\d:\d\d)")


def _sortable(time: bytes) -> tuple[float, str] | None:
    """Unix seconds and the digits of their fraction, more than a float holds; None where it is no time.

    In whatever zone the host is, whose clock may go back: 02:30:00.5+02:00 is an hour before 02:30:00.5+01:00.
    """
    found = _TIME.fullmatch(time.decode(errors="replace"))
    if found is None:
        return None
    whole, digits, zone = found.groups()
    return datetime.fromisoformat(whole + zone).timestamp(), (digits or "").ljust(9, "0")
