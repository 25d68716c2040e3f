"""Notification targets, which receive notices from the journal's outbox."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.util import find_spec

from orchestrator.backends.notify.notice import Notice
from orchestrator.backends.notify.webhook import parse_signing_key, send_webhook
from orchestrator.backends.ports import Receiver
from orchestrator.specs.notify import NotifySpec, TargetSpec

EXPIRES_S = 3 * 86_400.0  # a notice that a target could not be given for so long is dropped

log = logging.getLogger(__name__)


class Target(Receiver[Notice]):
    """A notification target of the cluster file. Its address is a secret, and is never shown."""

    def __init__(self, spec: TargetSpec, cluster: str, secrets: Mapping[str, str]) -> None:
        self.address = "webhook" if spec.webhook else "apprise"
        self.spec = spec
        self._cluster = cluster
        self._secrets = secrets

    def get_group_name(self, body: Notice) -> str:
        """Return the notice's own id as its group, so that each notice is sent alone."""
        return body.id

    def send(self, rows: Sequence[tuple[int, Notice]]) -> None:
        """Deliver the notices of the wanted kinds; drop those older than EXPIRES_S seconds. Raises
        OSError on failure.
        """
        wanted = [notice for _, notice in rows if notice.kind in self.spec.kinds]
        fresh = [notice for notice in wanted if notice.at_s > time.time() - EXPIRES_S]
        for notice in wanted:
            if notice not in fresh:
                log.error(
                    "target %s was away for %.0f s: %s is dropped",
                    self.spec.name,
                    EXPIRES_S,
                    notice.id,
                )
        if fresh:
            self.deliver(fresh)

    def deliver(self, notices: Sequence[Notice]) -> None:
        """Deliver one or more notices of any kind. Raises OSError, whose message holds no secret."""
        raise NotImplementedError

    @property
    def problem(self) -> str | None:
        """Sentence on a secret variable that is missing, so that nothing can be sent; None where
        all are set.
        """
        for name in (self.spec.apprise, self.spec.webhook, self.spec.signed_with):
            if name is not None and not self._secrets.get(name, "").strip():
                return f"no notice reaches {self.spec.name}: the service was started without the variable {name}"
        return None

    def read_secret(self, variable: str | None) -> str:
        """Return the value of the secret in this environment variable. Raises OSError where the
        service lacks it.
        """
        assert variable is not None, self.spec
        value = self._secrets.get(variable, "").strip()
        if not value:
            raise ConnectionError(f"the service was started without the variable {variable}")
        return value


class WebhookTarget(Target):
    """Target that is a signed webhook."""

    def __init__(
        self, spec: TargetSpec, notify: NotifySpec, cluster: str, secrets: Mapping[str, str]
    ) -> None:
        super().__init__(spec, cluster, secrets)
        self._allowed = frozenset(host.lower() for host in notify.allow_hosts)

    def deliver(self, notices: Sequence[Notice]) -> None:
        """POST each notice. On return the receiver has answered 2xx to all of them."""
        url = self.read_secret(self.spec.webhook)
        try:
            key = parse_signing_key(self.read_secret(self.spec.signed_with))
        except ValueError as error:
            raise ConnectionError(str(error)) from None
        for notice in notices:
            send_webhook(url, key, notice, self._cluster, self._allowed)


class AppriseTarget(Target):
    """Target by apprise, such as mail or chat. Notices that wait together become one message."""

    def get_group_name(self, body: Notice) -> str:
        """Return the group of a notice: reports are sent alone, all others together."""
        return body.id if body.kind == "report" else ""

    def deliver(self, notices: Sequence[Notice]) -> None:
        """Send one message. On failure, apprise gives no reason."""
        if find_spec("apprise") is None:
            raise ConnectionError("apprise is missing: pip install 'orchestrator[notify]'")
        import apprise

        logging.getLogger("apprise").disabled = True  # it may log the URL
        sender = apprise.Apprise(
            asset=apprise.AppriseAsset(app_id="orc", app_desc="orc", secure_logging=True)
        )
        if not sender.add(self.read_secret(self.spec.apprise)):
            raise ConnectionError(f"{self.spec.apprise} holds no URL that apprise knows")
        title = notices[0].title if len(notices) == 1 else f"{len(notices)} notices"
        parts = [f"{notice.text}\n\nid: {notice.id}" for notice in notices]
        if len(notices) > 1:
            parts = [
                f"## {notice.title}\n\n{part}" for notice, part in zip(notices, parts, strict=True)
            ]
        text = "\n\n".join(parts)
        try:
            sent = sender.notify(
                body=text,
                title=f"[{self._cluster}] {title}",
                body_format=apprise.NotifyFormat.MARKDOWN,
            )
        except Exception as error:  # a plug-in's edge: what it says may quote the URL
            raise ConnectionError(f"apprise raised {type(error).__name__}") from None
        if not sent:
            raise ConnectionError("apprise could not deliver it")


def make_targets(
    notify: NotifySpec, cluster: str, environment: MutableMapping[str, str]
) -> dict[str, Target]:
    """Return {target name: target}. The targets' secrets are removed from the environment, so that
    no job inherits them.
    """
    names = set()
    for target in notify.targets:
        for name in (target.apprise, target.webhook, target.signed_with):
            if name:
                names.add(name)
    secrets = {name: environment.pop(name) for name in sorted(names) if name in environment}
    return {
        target.name: WebhookTarget(target, notify, cluster, secrets)
        if target.webhook
        else AppriseTarget(target, cluster, secrets)
        for target in notify.targets
    }
