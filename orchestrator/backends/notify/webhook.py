"""Signed webhooks, with the headers of Standard Webhooks (standardwebhooks.com, version 1.0.0)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Collection
from datetime import UTC, datetime
from urllib.parse import urlsplit

from orchestrator.backends.notify.addresses import AddressRefused, PinnedConnection, resolve_host
from orchestrator.backends.notify.notice import Notice

PREFIX = "whsec_"
SECRET_BYTES = (24, 64)  # fewest and most
TIMEOUT_S = 10.0  # of each wait for the receiver
TOTAL_S = 30.0  # of one delivery


def parse_signing_key(secret: str) -> bytes:
    """Return the key bytes of a secret `whsec_BASE64`. Raises ValueError, without the secret, for
    another form.
    """
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not SECRET_BYTES[0] <= len(key) <= SECRET_BYTES[1]:
        raise ValueError(
            f"its signing secret is not {PREFIX} and {SECRET_BYTES[0]} to {SECRET_BYTES[1]} bytes, base64"
        )
    return key


def sign_message(key: bytes, message_id: str, timestamp_s: int, body: bytes) -> str:
    """Return `v1,` and the base64 of HMAC-SHA256 over message id, timestamp and body, joined by
    dots.
    """
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def make_webhook_body(notice: Notice, cluster_name: str) -> bytes:
    """Return the JSON body of the notice's webhook: type, timestamp of the event, and data. Equal
    notices give equal bytes.
    """
    timestamp = datetime.fromtimestamp(notice.at_s, UTC).isoformat()
    data = {"cluster": cluster_name, "title": notice.title, "text": notice.text, **notice.data}
    return json.dumps({"type": f"orc.{notice.kind}", "timestamp": timestamp, "data": data}).encode()


def send_webhook(
    url: str, signing_key: bytes, notice: Notice, cluster: str, allowed_hosts: Collection[str]
) -> None:
    """Send one notice to this URL, signed; return once the receiver has answered 2xx.

    Raises OSError, whose message never holds the URL.
    """
    try:
        _post_notice(url, signing_key, notice, cluster, allowed_hosts)
    except AddressRefused:
        raise
    except OSError as error:
        message = (
            os.strerror(error.errno) if type(error) is not ConnectionError and error.errno else ""
        )
        message = str(error) if type(error) is ConnectionError else message or type(error).__name__
        raise ConnectionError(message) from None
    except (http.client.HTTPException, ValueError) as error:  # what it says may quote the URL
        raise ConnectionError(f"no HTTP request or answer: {type(error).__name__}") from None


def _post_notice(
    url: str, signing_key: bytes, notice: Notice, cluster: str, allowed_hosts: Collection[str]
) -> None:
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    tls = parts.scheme == "https"
    if not host or parts.scheme not in ("https", "http"):
        raise ConnectionError("its URL is not https://HOST/PATH")
    if not tls and host not in allowed_hosts:
        raise AddressRefused(
            "it would be sent without TLS: use https, or name its host in `notify.allow_hosts`"
        )
    if parts.username or parts.password:
        raise ConnectionError("its URL holds a password: a receiver checks the signature")
    port = parts.port or (443 if tls else 80)
    connection = PinnedConnection(
        host, port, resolve_host(host, port, allowed_hosts), tls=tls, timeout_s=TIMEOUT_S
    )
    body = make_webhook_body(notice, cluster)
    timestamp_s = int(time.time())
    headers = {
        "Host": parts.netloc,
        "Content-Type": "application/json",
        "User-Agent": "orc",
        "webhook-id": notice.id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": sign_message(signing_key, notice.id, timestamp_s, body),
    }
    watchdog = threading.Timer(
        TOTAL_S, _shut_connection, (connection,)
    )  # a receiver may send a byte every few seconds
    watchdog.start()
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, body, headers)
        status = connection.getresponse().status
    finally:
        watchdog.cancel()
        connection.close()
    if 300 <= status < 400:
        raise ConnectionError(f"it answered {status}, a redirect, which is not followed")
    if not 200 <= status < 300:
        raise ConnectionError(f"it answered {status}")


def _shut_connection(connection: PinnedConnection) -> None:
    opened = connection.sock
    if opened is not None:
        try:
            opened.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has just ended
            return
