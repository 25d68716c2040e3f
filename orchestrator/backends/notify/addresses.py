"""Address checks of webhooks, and connections to exactly the checked address.

A name is resolved once: a second look-up could give another address (DNS rebinding; OWASP, Server Side Request Forgery
Prevention Cheat Sheet).
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address
WIRE_SERVER = ip_address(
    "168.63.129.16"
)  # Azure's, within each of its networks, and public by its number


class AddressRefused(ConnectionError):
    """The address is not allowed. The message contains no URL."""


def is_public_address(text: str) -> bool:
    """Return whether an IP address is on the public network: not private, loopback, link-local or a
    metadata service.
    """
    address = ip_address(text.partition("%")[0])
    return all(
        inner.is_global and not inner.is_multicast and inner != WIRE_SERVER
        for inner in _list_address_and_embedded_ipv4(address)
    )


def _list_address_and_embedded_ipv4(
    address: IPv4Address | IPv6Address,
) -> list[IPv4Address | IPv6Address]:
    """Return the address and the IPv4 addresses inside it, to which a gateway or the kernel may
    forward.
    """
    if isinstance(address, IPv4Address):
        return [address]
    inner: list[IPv4Address | IPv6Address] = []
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address.sixtofour is not None:
        inner.append(address.sixtofour)
    if address.teredo is not None:
        inner += address.teredo
    if address in NAT64:
        return [IPv4Address(int(address) & 0xFFFF_FFFF)]
    return [address, *inner]


def resolve_host(host: str, port: int, allowed_hosts: Collection[str]) -> list[str]:
    """Return a host's IP addresses, resolved once. Raises AddressRefused if an address is not
    public and the host not allowed.
    """
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise ConnectionError("the name of its host is not known") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    if host not in allowed_hosts:
        for address in addresses:
            if not is_public_address(address):
                raise AddressRefused(
                    f"the address {address} is not public: `notify.allow_hosts` may name its host"
                )
    return addresses


class PinnedConnection(http.client.HTTPSConnection):
    """HTTPS connection to one of the checked addresses, even if the host's name now resolves to
    others.
    """

    def __init__(
        self, host: str, port: int, addresses: list[str], *, tls: bool, timeout_s: float
    ) -> None:
        super().__init__(host, port, timeout=timeout_s, context=ssl.create_default_context())
        self._addresses = addresses
        self._tls = tls
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Connect to the first address that answers. The certificate must be valid for the host's
        name.
        """
        for number, address in enumerate(self._addresses, 1):
            try:
                connected = socket.create_connection((address, self.port), self._timeout_s)
                break
            except OSError:
                if number == len(self._addresses):
                    raise
        self.sock = connected
        if self._tls:
            self.sock = self._context.wrap_socket(connected, server_hostname=self.host)  # type: ignore[attr-defined]
