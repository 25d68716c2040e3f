"""The service's TLS endpoint for other machines: address, names, certificate. The loopback needs none."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import socket
import ssl
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen

FILE = "endpoint.json"
VALID = timedelta(days=365)  # of a certificate that the service makes for itself
PEM_MODE = 0o644
KEY_MODE = 0o600
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
ANY = frozenset({"0.0.0.0", "::"})
DOCUMENTATION = "192.0.2.1"  # RFC 5737: an address of no machine, to which the default route leads


@frozen
class Endpoint:
    """An address at which the service listens for other machines, always under TLS."""

    host: str  # address to bind; 0.0.0.0 for every interface
    port: int
    certificate: str  # path of a PEM file
    key: str  # path of its private key
    address: str  # of this machine, for the Ray of machines that join; on the loopback none can
    allowed_hosts: tuple[
        str, ...
    ] = ()  # names that a Host header may give besides this machine's own
    trusts_users: bool = False  # whose jobs may do all that the service's user may

    def list_allowed_host_names(self) -> frozenset[str]:
        """Return every host name that a request may use: loopback, this machine, the bound address,
        and allowed hosts.
        """
        bound = (self.address,) if self.host in ANY else (self.host, self.address)
        return LOOPBACK | {
            socket.gethostname().lower(),
            *bound,
            *(name.lower() for name in self.allowed_hosts),
        }

    def compute_fingerprint(self) -> str:
        """The SHA-256 of the endpoint's certificate, as `orc login --fingerprint` expects it."""
        return compute_certificate_fingerprint(Path(self.certificate).read_text())


def compute_certificate_fingerprint(certificate_pem: str) -> str:
    """Return `sha256:` and the digest of the first certificate in a PEM text. Raises ValueError without one."""
    first = (
        certificate_pem.partition("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----\n"
    )
    return f"sha256:{hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest()}"


def parse_host_and_port(
    host_and_port: str, option_name: str = "--listen", example: str = "0.0.0.0:8443"
) -> tuple[str, int]:
    """Return (host, port) of a text HOST:PORT; IPv6 addresses are in brackets.

    Raises SpecError, which names `option_name` and gives `example`.
    """
    host, colon, port = host_and_port.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise SpecError(
            "not an address",
            source=option_name,
            got=host_and_port,
            allowed=f"HOST:PORT, such as {example}",
        )
    return host.strip("[]"), int(port)


def find_reachable_address(host: str) -> str:
    """Return the IPv4 address by which other machines reach a service that listens on `host`.
    Raises SpecError without one.
    """
    if host in ANY:
        try:
            return find_local_address_towards(DOCUMENTATION, 9)
        except OSError:
            hint = "this machine has no default route: name its address, such as 10.0.0.1:8443"
            raise SpecError(
                "which address is it?", source="--listen", got=host, hint=hint
            ) from None
    try:
        return socket.gethostbyname(host)
    except OSError:
        return "127.0.0.1"  # an IPv6 address: Ray stays on the loopback


def find_local_address_towards(host: str, port: int) -> str:
    """Return the address that this machine has on its route to `host`. Sends nothing. Raises
    OSError without a route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def make_endpoint(
    home: Path,
    listen_address: str,
    certificate: Path | None,
    private_key: Path | None,
    allowed_hosts: tuple[str, ...],
    *,
    trusts_users: bool = False,
) -> Endpoint:
    """Return the endpoint for `orc up --listen`, with a new certificate in the home if none is
    given.

    Raises SpecError where a file cannot be read, or where certificate and key do not belong
    together.
    """
    host, port = parse_host_and_port(listen_address)
    address = find_reachable_address(host)
    if (certificate is None) != (private_key is None):
        raise SpecError(
            "a certificate and its key go together", source="--tls-cert", allowed="both, or neither"
        )
    if certificate is None or private_key is None:
        certificate = home / "tls" / "certificate.pem"
        private_key = home / "tls" / "key.pem"
        if not (certificate.exists() and private_key.exists()):
            _make_certificate(certificate, private_key, {host, address, *allowed_hosts} - ANY)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, private_key)
    except (OSError, ssl.SSLError) as error:
        hint = "name PEM files that belong together, or neither: the service then makes its own"
        raise SpecError(
            f"cannot serve under this certificate: {error}", source=str(certificate), hint=hint
        ) from None
    return Endpoint(
        host=host,
        port=port,
        certificate=str(certificate.resolve()),
        key=str(private_key.resolve()),
        address=address,
        allowed_hosts=tuple(sorted(allowed_hosts)),
        trusts_users=trusts_users,
    )


def format_endpoint(endpoint: Endpoint) -> str:
    """Return the endpoint as text, as it is stored in the home folder."""
    return json.dumps(asdict(endpoint), sort_keys=True)


def load_endpoint(home: Path) -> Endpoint | None:
    """Return the endpoint of the last `orc up --listen`; None if the service listens on the
    loopback only.
    """
    path = home / FILE
    return parse_endpoint(path.read_text(encoding="utf-8") if path.exists() else "")


def parse_endpoint(endpoint_text: str) -> Endpoint | None:
    """Return the endpoint from the text of `endpoint_text`; None for an empty text."""
    if not endpoint_text:
        return None
    fields = json.loads(endpoint_text)
    return Endpoint(**{**fields, "allowed_hosts": tuple(fields["allowed_hosts"])})


def _make_certificate(certificate: Path, private_key: Path, host_names: set[str]) -> None:
    """Write a self-signed certificate for these host names, and its key, to the two paths.

    Clients recognise the certificate by its fingerprint.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    private = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "orc")])
    now = datetime.now(UTC)
    alternatives = [
        _make_alternative_name(name)
        for name in sorted({*host_names, *LOOPBACK, socket.gethostname()})
    ]
    signed_certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    certificate.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unencrypted = serialization.NoEncryption()
    private_key.touch(KEY_MODE)
    private_key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, unencrypted
        )
    )
    certificate.write_bytes(signed_certificate.public_bytes(serialization.Encoding.PEM))
    certificate.chmod(PEM_MODE)


def _make_alternative_name(name: str):  # type: ignore[no-untyped-def]  # cryptography's GeneralName, imported late
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
