"""Pods as Kubernetes tells of them, and the engines that they are.

A pod is an engine while it is ready, has an address and is not being ended; else it gets no new request, and
finishes what it has. Nothing of a pod but its name, labels, address, readiness and end is read.
"""

from dataclasses import dataclass, field

import msgspec

from kvloop.router.target import MAX_TARGETS, Role, Target


class Metadata(msgspec.Struct, rename="camel"):
    """Of a pod, or of a list of them: `continue_` leads to the list's next page."""

    name: str = ""
    namespace: str = ""
    labels: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Condition(msgspec.Struct):
    """One thing that is true of a pod, false, or unknown."""

    type: str = ""
    status: str = ""


class Status(msgspec.Struct):
    """Where a pod is and whether it is ready."""

    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[Condition] | None = None


class Pod(msgspec.Struct):
    """A pod, as far as it is read."""

    metadata: Metadata
    status: Status = msgspec.field(default_factory=Status)


class PodList(msgspec.Struct):
    """One page of a list."""

    metadata: Metadata
    items: list[Pod] = []


class Event(msgspec.Struct):
    """One line of a watch; its object is a pod, a bookmark, or an error."""

    type: str
    object: msgspec.Raw


class Problem(msgspec.Struct):
    """Kubernetes' own word on what is wrong."""

    code: int = 0
    message: str = ""


@dataclass(slots=True)
class Pods:
    """The pods of one selector. `role` None leaves it to the label `role_label`."""

    port: int
    role: Role | None
    role_label: str = ""
    known: dict[tuple[str, str], Target] = field(default_factory=dict)

    def listed(self, pods: list[Pod]) -> None:
        """All of them, anew."""
        self.known = {}
        for pod in pods:
            self.changed(pod)

    def changed(self, pod: Pod) -> bool:
        """One of them is new or another than it was. Whether that makes another engine of it."""
        target = self._target(pod)
        if target is None:
            return self.gone(pod)
        is_news = self.known.get(_key(pod)) != target and len(self.known) < MAX_TARGETS
        if is_news:
            self.known[_key(pod)] = target
        return is_news

    def gone(self, pod: Pod) -> bool:
        """One of them is no more. Whether it was an engine."""
        return self.known.pop(_key(pod), None) is not None

    def targets(self) -> list[Target]:
        """The engines that there are."""
        return list(self.known.values())

    def _target(self, pod: Pod) -> Target | None:
        labels = pod.metadata.labels or {}
        role = self.role or _role_of(labels.get(self.role_label, ""))
        address = pod.status.pod_ip
        ready = any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or ())
        if not ready or not address or role is None or pod.metadata.deletion_timestamp is not None:
            return None
        host = f"[{address}]" if ":" in address else address
        return Target(f"http://{host}:{self.port}", role, labels=(("pod", pod.metadata.name),))


def _key(pod: Pod) -> tuple[str, str]:
    return pod.metadata.namespace, pod.metadata.name


def _role_of(word: str) -> Role | None:
    return Role(word) if word in [*Role] else None
